"""Mirror and log of one server's cache, and who waits for changes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import structlog

from kllm_engine.agent.cache.changes import Change, Removed, Stored, Tier
from kllm_engine.agent.cache.events import KvEvent
from kllm_engine.agent.cache.log import ChangeLog
from kllm_engine.agent.cache.mirror import CacheMirror, UnknownParentError
from kllm_engine.agent.changes import Changes

PART_BLOCKS = 50_000
"""Blocks in one message at most: 400 kB, well under gRPC's limit of 4 MB."""

_LOG_LIMIT = 1_000_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SnapshotPart:
    """Part of the whole cache at one moment."""

    tier: Tier
    blocks: tuple[int, ...]
    first: bool
    last: bool


Update = tuple[int, Change | SnapshotPart]


class CacheBook:
    """What the engine's cache holds, with the history that subscribers need to follow it.

    Args:
        page_size: tokens per block.
        log_limit: blocks kept in the log of changes.
    """

    def __init__(self, page_size: int, *, log_limit: int = _LOG_LIMIT) -> None:
        self._page_size = page_size
        self._mirror = CacheMirror(page_size)
        self._history = ChangeLog(log_limit)
        self.changes = Changes()
        self.skipped_events = 0

    @property
    def sequence(self) -> int:
        """Number of the newest change."""
        return self._history.sequence

    def __len__(self) -> int:
        return len(self._mirror)

    def apply(self, event: KvEvent) -> None:
        """Follow one event.

        Raises:
            UnknownParentError: events were lost before this one.
            ValueError: the event contradicts itself.
        """
        change = self._mirror.apply(event)
        if change is not None:
            self._append(change)

    def clear(self) -> None:
        """The cache is empty: the engine has begun a new incarnation."""
        self._append(self._mirror.clear())

    def rebuild(self, events: Iterable[KvEvent]) -> None:
        """Start again from what the engine still remembers; blocks with an unknown parent stay out."""
        mirror = CacheMirror(self._page_size)
        for event in events:
            try:
                mirror.apply(event)
            except (UnknownParentError, ValueError):
                self.skipped_events += 1
        self._append(self._mirror.clear())
        self._mirror = mirror
        for part in self._snapshot():
            if part.blocks:
                self._append(Stored(part.tier, part.blocks))
        _log.info("cache mirror rebuilt", blocks=len(mirror), skipped_events=self.skipped_events)

    def read(self, from_sequence: int) -> list[Update]:
        """Updates from `from_sequence` on, or the parts of a snapshot when the log no longer reaches back (or at 0)."""
        changes = self._history.since(from_sequence) if from_sequence else None
        if changes is None:
            return [(self.sequence, part) for part in self._snapshot()]
        return list(changes)

    def _append(self, change: Change) -> None:
        for part in _split(change):
            self._history.append(part)
        self.changes.notify()

    def _snapshot(self) -> list[SnapshotPart]:
        pieces = [(tier, piece) for tier in Tier for piece in _pieces(self._mirror.blocks(tier))]
        pieces = pieces or [(Tier.DEVICE, ())]
        last = len(pieces) - 1
        return [SnapshotPart(tier, blocks, at == 0, at == last) for at, (tier, blocks) in enumerate(pieces)]


def _pieces(blocks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return (blocks[start : start + PART_BLOCKS] for start in range(0, len(blocks), PART_BLOCKS))


def _split(change: Change) -> Iterator[Change]:
    if isinstance(change, Stored):
        yield from (Stored(change.tier, piece) for piece in _pieces(change.blocks))
    elif isinstance(change, Removed):
        yield from (Removed(change.tier, piece) for piece in _pieces(change.blocks))
    else:
        yield change
