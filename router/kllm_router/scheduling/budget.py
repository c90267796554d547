"""How many retries all requests together may cause. Pure: callers bring the clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_SLOTS = 20
"""Parts of a window; what is counted leaves it by parts."""


@dataclass(frozen=True)
class BudgetSettings:
    """Bound on retries and continuations of all requests, so that a fleet in trouble is not given more to do.

    Attributes:
        share: retries per request of the window, or per request in flight if those are more.
        window_seconds: over which both are counted.
        floor: retries that a window always allows, so that a quiet router can recover too.
    """

    share: float = 0.2
    window_seconds: float = 10.0
    floor: int = 64


class RetryBudget:
    """Counts requests and retries. `now` is monotonic seconds and never goes back."""

    def __init__(self, settings: BudgetSettings = BudgetSettings()) -> None:
        self._settings = settings
        self._requests = _Window(settings.window_seconds)
        self._retries = _Window(settings.window_seconds)

    def arrived(self, now: float) -> None:
        """A request has come."""
        self._requests.add(now)

    def spend(self, now: float, *, in_flight: int) -> bool:
        """Take one retry, if one is left."""
        if self._retries.total(now) >= self.limit(now, in_flight=in_flight):
            return False
        self._retries.add(now)
        return True

    def limit(self, now: float, *, in_flight: int) -> int:
        """Retries that the window allows in all."""
        requests = max(self._requests.total(now), in_flight)
        return self._settings.floor + math.floor(self._settings.share * requests)


class _Window:
    """A sliding count."""

    def __init__(self, seconds: float) -> None:
        self._slot_seconds = seconds / _SLOTS
        self._slots: deque[list[int]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        slot = math.floor(now / self._slot_seconds)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append([slot, 0])
        self._slots[-1][1] += 1
        self._total += 1
        self._forget(slot)

    def total(self, now: float) -> int:
        self._forget(math.floor(now / self._slot_seconds))
        return self._total

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - _SLOTS:
            self._total -= self._slots.popleft()[1]
