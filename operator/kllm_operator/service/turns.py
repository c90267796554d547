"""Keeps the event loop answering while hundreds of services have something to decide at the same moment."""

from __future__ import annotations

import asyncio
from collections import deque

_AT_ONCE = 4
"""A tick of a control loop takes some milliseconds: with four of them between two looks at its connections, the process
still looks dozens of times a second."""


class Turns:
    """Lets pieces of work begin a few at a time, in the order in which they asked; in between, all else goes on.

    Args:
        at_once: pieces that may begin between two looks at connections and timers.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, got {at_once}")
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._handle: asyncio.Handle | None = None

    async def wait(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if self._handle is None:
            self._handle = loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        begun = 0
        while self._waiting and begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                begun += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next) if self._waiting else None
