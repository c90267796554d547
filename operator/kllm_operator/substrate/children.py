"""All child processes of one run: recorded while they live, reported when one fails, ended in order."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from kllm_operator.substrate.child import Child
from kllm_operator.substrate.exceptions import ChildFailedError, SubstrateError
from kllm_operator.substrate.identity import RUN_VARIABLE
from kllm_operator.substrate.rundir import ProcessRecord, RunDirectory

STOP_ORDER = (("model", "router"), ("prefill", "decode"), ("zygote",))
"""Routers first, so that nothing new reaches the engines; the zygote last, since the end of an agent is told to it."""

_REMEMBERED_FAILURES = 16
"""Who waits asks at once; what came before the last few is in the log."""

_log = structlog.get_logger(__name__)


class Children:
    """Starts and ends the processes of a run.

    Args:
        run: claimed by the caller.
        run_id: goes into every child's environment.
        on_change: called after each event and each end of a child.
    """

    def __init__(self, run: RunDirectory, run_id: str, *, on_change: Callable[[Child, dict[str, Any]], None]) -> None:
        self._run = run
        self._environment = {**os.environ, RUN_VARIABLE: run_id}
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._failures: deque[tuple[str, ChildFailedError]] = deque(maxlen=_REMEMBERED_FAILURES)
        self._waiters: list[tuple[tuple[str, ...], asyncio.Future[ChildFailedError]]] = []

    def spawn(
        self,
        name: str,
        kind: str,
        arguments: tuple[str, ...],
        *,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> Child:
        """Start one; it is in state.json when this returns.

        Raises:
            SubstrateError: it cannot be started or recorded; nothing of it is left.
        """
        child = Child(
            name,
            kind,
            arguments=arguments,
            environment=self._environment,
            log=self._run.log_file(name),
            on_event=lambda child, event: self._notice(child, event, on_event),
            on_exit=self._ended,
        )
        self._children[name] = child
        try:
            self._record()
        except OSError as error:
            # What is not recorded would outlive a killed owner.
            child.kill()
            del self._children[name]
            raise SubstrateError(f"{name} cannot be recorded in {self._run.path}: {error.strerror}") from error
        return child

    async def failure(self, *kinds: str) -> ChildFailedError:
        """Wait for the first child, of some kinds or of any, that ends without having been asked to."""
        for kind, error in self._failures:
            if not kinds or kind in kinds:
                return error
        future: asyncio.Future[ChildFailedError] = asyncio.get_running_loop().create_future()
        waiter = (kinds, future)
        self._waiters.append(waiter)
        try:
            return await future
        finally:
            self._waiters.remove(waiter)

    async def stop(self, child: Child, *, grace_seconds: float) -> None:
        """End one child and forget it."""
        await child.stop(grace_seconds)
        self._forget(child)

    async def stop_all(self, *, budget_seconds: float) -> None:
        """End all, kind by kind, each with a share of what is left of the time; what is slower is killed."""
        deadline = time.monotonic() + budget_seconds
        for index, kinds in enumerate(STOP_ORDER):
            share = max(0.05, (deadline - time.monotonic()) / (len(STOP_ORDER) - index) * 1.2)
            await asyncio.gather(*(child.stop(share) for child in self.of(*kinds)))
        for child in list(self._children.values()):
            self._forget(child)

    def kill_all(self) -> None:
        """End all at once; their ends are seen later."""
        for child in self._children.values():
            child.kill()

    def of(self, *kinds: str) -> Iterable[Child]:
        """Children of some kinds."""
        return [child for child in self._children.values() if child.kind in kinds]

    def _notice(self, child: Child, event: dict[str, Any], on_event: Callable[[dict[str, Any]], None] | None) -> None:
        if on_event is not None:
            on_event(event)
        self._on_change(child, event)

    def _ended(self, child: Child) -> None:
        if not child.stopping and not (child.kind == "model" and child.exit_status == 0):
            error = child.failed()
            _log.info("ProcessEnded", name=child.name, why=error.why, log=str(child.log))
            self._failures.append((child.kind, error))
            for kinds, future in self._waiters:
                if not future.done() and (not kinds or child.kind in kinds):
                    future.set_result(error)
        self._on_change(child, {"event": "ended", "status": child.exit_status})

    def _forget(self, child: Child) -> None:
        if self._children.pop(child.name, None) is not None:
            try:
                self._record()
            except OSError as error:
                # A process that has ended may stay recorded: its number and start time are of no living one.
                _log.error("StateNotWritten", path=str(self._run.path), why=error.strerror)

    def _record(self) -> None:
        self._run.update(
            processes=tuple(
                ProcessRecord(child.name, child.kind, child.pid, child.identity.started, str(child.log))
                for child in self._children.values()
            )
        )
