"""What happens when, in simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Entry:
    """Something that will happen, unless it is called off."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None] | None) -> None:
        self.call = call

    def cancel(self) -> None:
        """It will not happen."""
        self.call = None


class Agenda:
    """Calls in the order of their times; those of one time in the order in which they were entered.

    Attributes:
        now: simulated seconds.
        events: calls that were made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Entry]] = []
        self._order = itertools.count()

    def at(self, moment: float, call: Callable[[], None]) -> Entry:
        """Have a function called at a moment, or now if that is past."""
        entry = Entry(call)
        heapq.heappush(self._heap, (max(moment, self.now), next(self._order), entry))
        return entry

    def after(self, seconds: float, call: Callable[[], None]) -> Entry:
        """The same from now on."""
        return self.at(self.now + seconds, call)

    @property
    def next_at(self) -> float | None:
        """When the next call comes; None: nothing will happen any more."""
        heap = self._heap
        while heap and heap[0][2].call is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def step(self) -> None:
        """Go to the next call and make it; there must be one."""
        moment, _, entry = heapq.heappop(self._heap)
        call, entry.call = entry.call, None
        if call is not None:
            self.now = moment
            self.events += 1
            call()

    def skip_to(self, moment: float) -> None:
        """Let time pass in which nothing happens."""
        self.now = max(self.now, moment)
