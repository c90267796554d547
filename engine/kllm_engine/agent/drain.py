"""Lets an instance run empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kllm_core.fleet import InstanceState
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import LoadBook

_POLL_SECONDS = 0.1
_QUIET_SECONDS = 0.5
"""An engine counts as empty after so long without requests: one may be between its HTTP server and its scheduler."""


@dataclass(frozen=True)
class Progress:
    """What a drain has come to."""

    remaining: int
    drained: bool = False
    deadline_passed: bool = False


class DrainWatch:
    """Begins a drain and follows it; any number may follow at once.

    Args:
        instance: that is drained.
        loads: say what remains.
    """

    def __init__(self, instance: Instance, loads: LoadBook) -> None:
        self._instance = instance
        self._loads = loads
        self._began_at: float | None = None

    def begin(self, message: str) -> None:
        """Take nothing new; there is no way back."""
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._instance.move(InstanceState.DRAINING, message)

    async def follow(self, deadline_seconds: float | None) -> AsyncIterator[Progress]:
        """Tell each change of what remains; the last item is drained or has passed the deadline."""
        began = time.monotonic()
        told: int | None = None
        empty_since: float | None = None
        while True:
            now = time.monotonic()
            remaining = self._remaining()
            empty_since = (empty_since if empty_since is not None else now) if remaining == 0 else None
            if empty_since is not None and now - empty_since >= _QUIET_SECONDS:
                yield Progress(0, drained=True)
                return
            if deadline_seconds is not None and now - began >= deadline_seconds:
                yield Progress(self._loads.remaining_requests() or 0, deadline_passed=True)
                return
            if remaining is not None and remaining != told:
                told = remaining
                yield Progress(remaining)
            await asyncio.sleep(_POLL_SECONDS)

    def _remaining(self) -> int | None:
        """Requests left; None while the engine has said nothing since the drain began."""
        load = self._loads.latest
        if load is None or self._began_at is None or load.now < self._began_at:
            return None
        return self._loads.remaining_requests()
