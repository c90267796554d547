"""Work beside the engine, none of which may end unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

_PAUSE_SECONDS = 2.0
"""Before what failed is begun again: long enough that a lasting cause fills no log."""

_log = structlog.get_logger(__name__)


async def kept_up(name: str, work: Callable[[], Awaitable[None]], *, pause_seconds: float = _PAUSE_SECONDS) -> None:
    """Do it to its end, and begin again whenever it fails.

    For work that loses nothing that matters by that: an engine that serves is not to be ended because of it.

    Args:
        name: for the log.
        work: begins it.
        pause_seconds: between a failure and the next try.
    """
    while True:
        try:
            return await work()
        except Exception:  # noqa: BLE001  whatever it was, the engine serves without it
            _log.exception("a helper of the agent failed", helper=name, again_seconds=pause_seconds)
        await asyncio.sleep(pause_seconds)
