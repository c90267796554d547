"""Lets an instance run empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kllm_core.fleet import InstanceState
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import LoadBook

_POLL_SECONDS = 0.05
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
        """Take nothing new. The way back is a switch of roles."""
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._instance.move(InstanceState.DRAINING, message)

    def end(self) -> None:
        """What was drained begins anew."""
        self._began_at = None

    async def follow(self, deadline_seconds: float | None) -> AsyncIterator[Progress]:
        """Tell each change of what remains; the last item is drained or has passed the deadline."""
        began = time.monotonic()
        told: int | None = None
        quiet_since = self._began_at or began
        while True:
            if self._began_at is None:
                # It switched roles, which it does only when it is empty.
                yield Progress(0, drained=True)
                return
            now = time.monotonic()
            remaining = self.remaining()
            if remaining:
                quiet_since = now
            if remaining == 0 and now - quiet_since >= _QUIET_SECONDS:
                yield Progress(0, drained=True)
                return
            if deadline_seconds is not None and now - began >= deadline_seconds:
                yield Progress(self._loads.remaining_requests() or 0, deadline_passed=True)
                return
            if remaining is not None and remaining != told:
                told = remaining
                yield Progress(remaining)
            await asyncio.sleep(_POLL_SECONDS)

    def remaining(self) -> int | None:
        """Requests left; None while that is not known for any moment since the drain began.

        An engine that was empty before and lives is empty: it tells of a request as soon as it has one.
        """
        remaining = self._loads.remaining_requests()
        if remaining is None or self._began_at is None:
            return None
        told_at = self._loads.told_at if remaining else self._loads.alive_at
        return remaining if told_at >= self._began_at else None
