"""One child process: its own session, its log, the JSON lines it prints, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from kllm_operator.substrate.exceptions import ChildFailedError, SubstrateError
from kllm_operator.substrate.identity import ProcessIdentity, identify
from kllm_operator.substrate.rundir import tail

_LINE_LIMIT = 1 << 20
_log = structlog.get_logger(__name__)

EventHandler = Callable[["Child", dict[str, Any]], None]


class Child:
    """A running child. To be made in the main thread of a running loop: a child dies with the thread that made it.

    Starting is one synchronous step, so that no cancellation can lose a process between its fork and its registration.

    Args:
        name: for messages; unique in the run.
        kind: prefill, decode, router, zygote or model.
        arguments: the command line.
        environment: the whole environment.
        log: takes standard error, and lines of standard output that are no events.
        on_event: called with each JSON object that the child prints.
        on_exit: called once, after its end.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        on_event: EventHandler,
        on_exit: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.kind = kind
        self.log = log
        self.stopping = False
        self.failure: str | None = None
        self._on_event = on_event
        self._on_exit = on_exit
        self._buffer = b""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            log.parent.mkdir(mode=0o700, exist_ok=True)
            log.unlink(missing_ok=True)
            self._log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SubstrateError(f"{name}: its log {log} cannot be made: {error.strerror}") from error
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log_file,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._log_file)
            raise SubstrateError(f"{name}: {arguments[0]} cannot be started: {error.strerror}") from error
        self.identity = identify(self.pid) or ProcessIdentity(self.pid, 0)
        self._output = self._process.stdout.fileno() if self._process.stdout else -1
        os.set_blocking(self._output, False)
        self._exit_notice = os.pidfd_open(self.pid)
        self._loop.add_reader(self._exit_notice, self._on_exit_notice)
        self._loop.add_reader(self._output, self._read)

    @property
    def pid(self) -> int:
        """Its process number, which is also that of its session and process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet."""
        return not self._ended.is_set()

    @property
    def exit_status(self) -> int | None:
        """As in subprocess: negative for a signal; None while it runs."""
        return self._process.returncode

    def failed(self, why: str | None = None) -> ChildFailedError:
        """The error that tells what became of it, with the last lines of its log."""
        reason = why or self.failure or describe_exit(self.exit_status)
        return ChildFailedError(self.name, reason, log=self.log, log_tail=tail(self.log))

    async def wait(self) -> None:
        """Wait for its end."""
        await self._ended.wait()

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end, wait, then kill its process group; returns when it has ended."""
        self.stopping = True
        if self.running:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_seconds):
                    await self.wait()
            except TimeoutError:
                _log.warning("ProcessKilled", name=self.name, pid=self.pid, grace_seconds=grace_seconds)
                self.kill()
        await self.wait()

    def kill(self) -> None:
        """End its whole process group at once."""
        self.stopping = True
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _on_exit_notice(self) -> None:
        self._loop.remove_reader(self._exit_notice)
        os.close(self._exit_notice)
        # Still a zombie here, so the number cannot be anyone else's: the last moment to end what it left in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._read()
        self._close_output()
        os.close(self._log_file)
        self._ended.set()
        self._on_exit(self)

    def _close_output(self) -> None:
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._loop.remove_reader(self._output)
            self._process.stdout.close()

    def _read(self) -> None:
        while self._process.stdout is not None and not self._process.stdout.closed:
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                data = b"\n"
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if len(self._buffer) > _LINE_LIMIT:
                lines.append(self._buffer)
                self._buffer = b""
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            if event["event"] == "failed":
                self.failure = f"failed: {event.get('message') or 'no reason given'}"
            self._on_event(self, event)
        elif line.strip():
            os.write(self._log_file, line + b"\n")


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "is not ready"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
