"""Requests that no instance can take, until one can or their time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kllm.sim.agenda import Agenda, Entry
from kllm.sim.flights import Flight


class WaitingRoom:
    """Requests in the order in which they came.

    Args:
        agenda: of the simulation.
        seconds: for which each waits at most.
        expired: called with one whose time is over; it has left by then.
    """

    def __init__(self, agenda: Agenda, seconds: float, expired: Callable[[Flight], None]) -> None:
        self._agenda, self._seconds, self._expired = agenda, seconds, expired
        self._timers: dict[Flight, Entry] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[Flight]:
        """Those that wait now, whoever leaves meanwhile."""
        return iter(list(self._timers))

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return sum(flight.prompt_tokens for flight in self._timers)

    def enter(self, flight: Flight) -> None:
        """One waits; nothing changes for one that does already."""
        if flight not in self._timers:
            self._timers[flight] = self._agenda.after(self._seconds, partial(self._expire, flight))

    def leave(self, flight: Flight) -> None:
        """One waits no longer."""
        timer = self._timers.pop(flight, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, flight: Flight) -> None:
        del self._timers[flight]
        self._expired(flight)
