"""The last changes of the cache, numbered. Pure."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kllm_engine.agent.cache.changes import Change, Cleared, weight


class ChangeLog:
    """Bounded; numbers run from 1 without gaps. Number 1 is the empty cache of a new server.

    Args:
        limit: what the log may hold, in blocks (and one for each change). The newest change is always kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: deque[Change] = deque([Cleared()])
        self._weight = weight(Cleared())
        self._sequence = 1

    @property
    def sequence(self) -> int:
        """Number of the newest change."""
        return self._sequence

    @property
    def first(self) -> int:
        """Number of the oldest change that is still here."""
        return self._sequence - len(self._changes) + 1

    def append(self, change: Change) -> int:
        """Add a change and return its number."""
        self._changes.append(change)
        self._weight += weight(change)
        self._sequence += 1
        while self._weight > self._limit and len(self._changes) > 1:
            self._weight -= weight(self._changes.popleft())
        return self._sequence

    def since(self, sequence: int) -> list[tuple[int, Change]] | None:
        """Changes numbered `sequence` and later; empty when `sequence` is the next one to come.

        Returns:
            None when some of them are gone, or `sequence` was never reached: only a snapshot helps then.
        """
        if not self.first <= sequence <= self._sequence + 1:
            return None
        skipped = sequence - self.first
        return [(sequence + offset, change) for offset, change in enumerate(islice(self._changes, skipped, None))]
