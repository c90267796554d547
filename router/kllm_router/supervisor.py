"""Several worker processes that serve as one router: started, replaced when they end, and stopped together.

This process opens a listening socket for each worker, all on one port, among which the kernel spreads connections. A
socket outlives its worker, so that connections that come while a worker is replaced wait for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from kllm_router.arguments import ArgumentError, Arguments, Worker, write_address, write_worker
from kllm_router.frontend.http_server import BACKLOG
from kllm_router.metrics import SHARED_FOLDER_VARIABLE
from kllm_router.pauses import backoff
from kllm_router.shared.folder import new_folder

if TYPE_CHECKING:
    from asyncio.subprocess import Process

_METRICS = "metrics"
_START_SECONDS = 120.0
_STEADY_SECONDS = 30.0
"""A worker that lived for so long is replaced without a pause."""
_GRACE_SECONDS = 15.0
"""Beyond what a worker allows itself to stop in; then it is killed."""
_KILLED = 1

_log = structlog.get_logger(__name__)


async def supervise(arguments: Arguments, argv: Sequence[str]) -> int:
    """Serve with `arguments.workers` processes until SIGTERM or SIGINT, and give the exit code.

    Args:
        arguments: as parsed.
        argv: as given; workers are started with the same.

    Raises:
        ArgumentError: an address cannot be had.
    """
    supervisor = _Supervisor(arguments, argv)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.tell_stop)
    try:
        return await supervisor.run()
    finally:
        await supervisor.close()


class _Supervisor:
    def __init__(self, arguments: Arguments, argv: Sequence[str]) -> None:
        self._arguments = arguments
        self._folder = new_folder()
        (self._folder / _METRICS).mkdir()
        self._sockets: list[socket.socket] = []
        self._reserved: socket.socket | None = None
        try:
            self._flags = [*argv, *self._open()]
        except ArgumentError:
            self._free()
            raise
        self._processes: dict[int, Process] = {}
        self._stop = asyncio.Event()

    def _open(self) -> Iterator[str]:
        """Take the ports, and give the flags that name them."""
        host, port = self._arguments.listen
        try:
            for _ in range(self._arguments.workers):
                self._sockets.append(_bound(host, port))
                port = self._sockets[0].getsockname()[1]
        except OSError as error:
            raise ArgumentError(f"--listen {write_address(host, port)}: {error.strerror or error}") from error
        if self._arguments.grpc_listen is not None:
            host, port = self._arguments.grpc_listen
            try:
                # Nothing is accepted here; it keeps the port while workers come and go.
                self._reserved = _bound(host, port)
            except OSError as error:
                raise ArgumentError(f"--grpc-listen {write_address(host, port)}: {error.strerror or error}") from error
            yield from ("--grpc-listen", write_address(host, self._reserved.getsockname()[1]))
        for each in self._sockets:
            each.listen(BACKLOG)

    def tell_stop(self) -> None:
        """Let the workers finish; told again, they stop at once."""
        self._stop.set()
        # Connections that came to a socket that only this process has would wait for nobody.
        self._close_sockets()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def run(self) -> int:
        """Serve until told to stop, and give the exit code."""
        count = self._arguments.workers
        keepers: list[asyncio.Task[int]] = []
        try:
            starts = await asyncio.gather(*(self._start(number, replaces=False) for number in range(count)))
            codes = [process.returncode or _KILLED for process, event in starts if event is None]
            if codes:
                return 0 if self._stop.is_set() else max(codes)
            event = next(told for _, told in starts if told is not None)
            print(orjson.dumps({**event, "workers": count}).decode(), flush=True)  # noqa: T201  as one router prints it
            keepers = [asyncio.create_task(self._keep(number, starts[number][0])) for number in range(count)]
            await self._stop.wait()
            arguments = self._arguments
            seconds = arguments.lame_duck_seconds + arguments.drain_seconds + _GRACE_SECONDS
            done, late = await asyncio.wait(keepers, timeout=seconds)
            if late:
                _log.error("workers did not stop in time and are killed", workers=len(late))
            return max([_KILLED] * bool(late) + [task.result() for task in done])
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def close(self) -> None:
        """End what still runs, and free all."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in self._processes.values():
            await process.wait()
        self._free()

    # --- one worker

    async def _keep(self, number: int, process: Process) -> int:
        """Replace a worker whenever it ends, until all stop; give the last one's exit code."""
        pauses, since = _pauses(), time.monotonic()
        while True:
            code = await process.wait()
            self._bury(process.pid)
            if self._stop.is_set():
                return code
            lived = time.monotonic() - since
            if lived >= _STEADY_SECONDS:
                pauses = _pauses()
            pause = next(pauses)
            _log.error("a worker has ended and is replaced", worker=number, code=code, after_seconds=round(lived, 1))
            await asyncio.sleep(0 if lived >= _STEADY_SECONDS else pause)
            if self._stop.is_set():
                return 0
            since = time.monotonic()
            process, _ = await self._start(number, replaces=True)

    async def _start(self, number: int, *, replaces: bool) -> tuple[Process, dict[str, Any] | None]:
        """Start a worker; without an event, it has ended, or was given up, before it served."""
        ready, told = os.pipe()
        accepting = self._sockets[number].fileno()
        worker = Worker(number, accepting, told, self._folder, replaces)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kllm_router.main", *self._flags),
                *("--as-worker", write_worker(worker), "--parent-pid", str(os.getpid())),
                pass_fds=(accepting, told),
                start_new_session=True,  # a signal from the terminal comes once, from here
                env={**os.environ, SHARED_FOLDER_VARIABLE: str(self._folder / _METRICS)},
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(told)
        self._processes[number] = process
        if self._stop.is_set():
            process.terminate()
        line = await _line(ready)
        if line:
            return process, orjson.loads(line)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return process, None

    def _bury(self, pid: int) -> None:
        """Forget what a worker had in flight; what it counted stays."""
        for path in self._folder.glob(f"*-{pid}.told"):
            path.unlink(missing_ok=True)
        for path in (self._folder / _METRICS).glob(f"gauge_live*_{pid}.db"):
            path.unlink(missing_ok=True)

    # --- what this process holds

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        if self._reserved is not None:
            self._reserved.close()

    def _free(self) -> None:
        self._close_sockets()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _line(descriptor: int) -> bytes:
    """What is written into a pipe before it is closed; nothing when that takes too long."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(descriptor, "rb", 0) as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await reader.readline()
        except TimeoutError:
            return b""
        finally:
            transport.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address that others may have too.

    Raises:
        OSError: the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _pauses() -> Iterator[float]:
    return backoff(random.Random(), first_seconds=0.1, most_seconds=5.0)  # noqa: S311  spreads starts, guards nothing
