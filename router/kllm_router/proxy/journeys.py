"""What the router knows of its requests' ways over instances, and what it learns from them for the next ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kllm_core.blocks import block_hash_array
from kllm_router.interfaces import EngineRequest, EventKind, WatchedEvent
from kllm_router.scheduling.block_table import Hashes
from kllm_router.scheduling.choices import Choice
from kllm_router.scheduling.expected import Mark, marks
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings
from kllm_router.scheduling.prompts import Prompts
from kllm_router.scheduling.transfers import TransferTimes

_MAX_CHAINS = 256
"""A request is given to a prefill and to a decode instance shortly after one another, and rarely to more."""
_NO_BLOCKS = np.zeros(0, np.uint64)


@dataclass
class _Handover:
    """KV that a decode instance was asked to take.

    Attributes:
        since: when it could begin, on the monotonic clock.
    """

    prefill: str
    decode: str
    tokens: int
    since: float


class Journeys:
    """Requests by their ids. `now` is monotonic seconds.

    Attributes:
        prompts: chooses prefill instances.
        transfers: what moving KV takes.

    Args:
        settings: how prefill instances are judged.
    """

    def __init__(self, settings: PrefillSettings) -> None:
        self.prompts = Prompts(settings)
        self.transfers = TransferTimes()
        self._chains: OrderedDict[str, tuple[int, Hashes]] = OrderedDict()
        self._handovers: dict[str, _Handover] = {}
        self._predicted: dict[str, float] = {}

    def chain(self, request: EngineRequest, page_size: int) -> Hashes:
        """Hashes of a prompt's blocks."""
        known = self._chains.get(request.rid)
        if known is not None and known[0] == page_size:
            return known[1]
        hashes = block_hash_array(request.input_ids, page_size, adapter=request.adapter, salt=request.salt)
        self._chains[request.rid] = page_size, hashes
        if len(self._chains) > _MAX_CHAINS:
            self._chains.popitem(last=False)
        return hashes

    def sent(
        self, request: EngineRequest, choice: Choice, candidates: Sequence[PrefillCandidate], *, now: float
    ) -> tuple[Mark, ...]:
        """A prompt goes to the prefill instance of a choice; returns the marks of its prefix."""
        chosen = next(each for each in candidates if each.instance.id == choice.instance_id)
        known = self._chains.get(request.rid)
        prefix = marks(_NO_BLOCKS if known is None else known[1])
        self.prompts.sent(request.rid, chosen, marks=prefix, prompt_tokens=len(request.input_ids), now=now)
        self._predicted[request.rid] = choice.cost.seconds
        return prefix

    def predicted(self, rid: str) -> float | None:
        """Seconds from sending a prompt until its KV is complete, as they were predicted."""
        return self._predicted.get(rid)

    def bound(self, request: EngineRequest, prefill: str, decode: str, *, now: float) -> None:
        """A decode instance is asked to take the KV."""
        self._handovers[request.rid] = _Handover(prefill, decode, len(request.input_ids), now)

    def heard(self, rid: str, event: WatchedEvent, *, is_told: bool, now: float) -> None:
        """A milestone on the prefill instance, which tells of its cache, or does not."""
        handover = self._handovers.get(rid)
        if event.kind is EventKind.PREFILL_DONE:
            new = event.prompt_tokens - event.cached_tokens
            self.prompts.computed(
                rid,
                new_tokens=new,
                cached_tokens=event.cached_tokens,
                seconds=event.prefill_seconds,
                is_told=is_told,
                now=now,
            )
            if handover is not None:
                handover.since = now
        elif event.kind is EventKind.RELEASED and handover is not None and event.reason == "Transferred":
            del self._handovers[rid]
            self.transfers.observe(handover.prefill, handover.decode, handover.tokens, now - handover.since)

    def left(self, rid: str, now: float) -> None:
        """A request has left its prefill instance."""
        self.prompts.left(rid, now)
        self._handovers.pop(rid, None)
        self._predicted.pop(rid, None)
        self._chains.pop(rid, None)

    def forget(self, instance_id: str) -> None:
        """The instance has left, or is another process now."""
        self.prompts.forget(instance_id)
        self.transfers.forget(instance_id)
