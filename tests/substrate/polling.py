"""Waits for what nothing else tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def polled(condition: Callable[[], object], *, every_seconds: float = 0.01) -> None:
    """Return once a condition holds; whoever waits sets the limit."""
    while not condition():  # noqa: ASYNC110  files and records have no event to wait for
        await asyncio.sleep(every_seconds)
