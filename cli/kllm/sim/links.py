"""The way of KV from prefill to decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kllm.sim.agenda import Agenda, Entry
from kllm.sim.scenario import Link


class Transfer:
    """KV on its way; it can be called off."""

    __slots__ = ("ends", "entry", "left", "share", "since", "then")

    def __init__(self, ends: tuple[str, ...], tokens: float, then: Callable[[], None]) -> None:
        self.ends, self.left, self.then = ends, tokens, then
        self.share, self.since = 0.0, 0.0
        self.entry: Entry | None = None


class Links:
    """One link of each instance.

    A transfer gets the smaller of its shares at both ends; a share is a link's bandwidth over its transfers.

    Args:
        agenda: of the simulation.
        link: of each instance.
    """

    def __init__(self, agenda: Agenda, link: Link) -> None:
        self._agenda, self._link = agenda, link
        self._on: dict[str, dict[Transfer, None]] = {}

    def send(self, ends: tuple[str, ...], tokens: float, then: Callable[[], None], *, wait: float = 0.0) -> Transfer:
        """Begin a transfer.

        Args:
            ends: instances whose links it uses.
            tokens: whose KV it is.
            then: called when it is there.
            wait: seconds until it begins.
        """
        transfer = Transfer(ends, tokens, then)
        transfer.entry = self._agenda.after(wait + self._link.base_seconds, lambda: self._flow(transfer))
        return transfer

    def call_off(self, transfer: Transfer) -> None:
        """It is not wanted any more."""
        if transfer.entry is not None:
            transfer.entry.cancel()
        self._leave(transfer)

    def _flow(self, transfer: Transfer) -> None:
        if not self._link.shared:
            transfer.entry = self._agenda.after(transfer.left * self._link.seconds_per_token, transfer.then)
            return
        transfer.since = self._agenda.now
        for end in transfer.ends:
            self._on.setdefault(end, {})[transfer] = None
        self._share_again(transfer.ends)

    def _arrive(self, transfer: Transfer) -> None:
        self._leave(transfer)
        transfer.then()

    def _leave(self, transfer: Transfer) -> None:
        there = [end for end in transfer.ends if transfer in self._on.get(end, ())]
        for end in there:
            del self._on[end][transfer]
            if not self._on[end]:
                del self._on[end]
        self._share_again(tuple(there))

    def _share_again(self, ends: tuple[str, ...]) -> None:
        now, per_token = self._agenda.now, self._link.seconds_per_token
        touched = {transfer: None for end in ends for transfer in self._on.get(end, ())}
        for transfer in touched:
            share = 1 / max(len(self._on[end]) for end in transfer.ends)
            if share == transfer.share:
                continue
            if per_token > 0:
                transfer.left = max(0.0, transfer.left - (now - transfer.since) * transfer.share / per_token)
            transfer.share, transfer.since = share, now
            if transfer.entry is not None:
                transfer.entry.cancel()
            transfer.entry = self._agenda.after(transfer.left * per_token / share, partial(self._arrive, transfer))
