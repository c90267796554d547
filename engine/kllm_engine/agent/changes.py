"""Wakes whoever waits for a change, without remembering what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """One source, any number of waiters. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake every subscriber."""
        for event in self._waiters:
            event.set()

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """An event that is set at each change until the subscriber clears it."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            yield event
        finally:
            self._waiters.discard(event)


async def wait_set(event: asyncio.Event, timeout_seconds: float) -> bool:
    """Whether the event was set within the time; it is cleared if so."""
    if not event.is_set():
        try:
            async with asyncio.timeout(max(0.0, timeout_seconds)):
                await event.wait()
        except TimeoutError:
            return False
    event.clear()
    return True
