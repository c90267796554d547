"""The agent's side of the zygote: start a server, hear of its end, kill it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kllm_engine.start.protocol import (
    MAXIMUM_PACKET_BYTES,
    Event,
    Exited,
    Fork,
    Kill,
    Refused,
    Started,
    decode_event,
    encode,
)

KILLED = -9
"""Status of a server whose zygote went away: the kernel kills servers with it."""


class ZygoteError(Exception):
    """The zygote is not there, or refused."""


class ForkedServer:
    """A server of this agent; it lives while this object is open.

    Attributes:
        pid: its first process, leader of its process group.
        name: as given at the fork.
    """

    def __init__(self, channel: socket.socket, *, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self._channel = channel
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name=f"zygote-{name}")

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._status.result() if self._status.done() else None

    async def wait_exit(self) -> int:
        """Exit code, or minus the signal's number; any number of callers may wait."""
        return await asyncio.shield(self._status)

    async def kill(self) -> None:
        """Kill the whole process group; `wait_exit` then returns."""
        if self._status.done():
            return
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, encode(Kill()))
        except OSError:
            # The zygote has gone, and with it the server; the reader notices the same.
            return

    async def close(self) -> None:
        """Let go of the server: one that still runs is killed by the zygote."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._channel.close()
        self._end(KILLED)

    async def _read(self) -> None:
        status = KILLED
        try:
            while (event := await _receive(self._channel)) is not None:
                if isinstance(event, Exited):
                    status = event.status
                    return
        finally:
            self._end(status)

    def _end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


class ZygoteClient:
    """Asks one zygote for servers."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    async def fork(
        self,
        *,
        name: str,
        args: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        timeout: float = 180.0,  # noqa: ASYNC109  covers connect, the zygote's imports and the fork
    ) -> ForkedServer:
        """Start a server; waits for the zygote's imports if they are not done.

        Raises:
            ZygoteError: no zygote listens, it refused, or it did not answer in time.
        """
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            async with asyncio.timeout(timeout):
                pid = await self._ask(channel, Fork(name=name, args=list(args), env=dict(env), log=str(log)))
        except TimeoutError as error:
            channel.close()
            raise ZygoteError(f"zygote {self._socket_path} did not start {name} within {timeout:.0f} s") from error
        except BaseException:
            channel.close()
            raise
        return ForkedServer(channel, pid=pid, name=name)

    async def _ask(self, channel: socket.socket, request: Fork) -> int:
        loop = asyncio.get_running_loop()
        try:
            await _connect(channel, self._socket_path)
            await loop.sock_sendall(channel, encode(request))
            event = await _receive(channel)
        except OSError as error:
            raise ZygoteError(f"zygote {self._socket_path}: {error.strerror}") from error
        if isinstance(event, Started):
            return event.pid
        reason = event.message if isinstance(event, Refused) else "it closed the connection"
        raise ZygoteError(f"zygote {self._socket_path} did not start {request.name}: {reason}")


async def _connect(channel: socket.socket, path: Path) -> None:
    """Connect, waiting for a socket that is about to listen or whose backlog is full."""
    while True:
        try:
            await asyncio.get_running_loop().sock_connect(channel, str(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            await asyncio.sleep(0.05)
        else:
            return


async def _receive(channel: socket.socket) -> Event | None:
    """Next event; None when the zygote has gone."""
    try:
        packet = await asyncio.get_running_loop().sock_recv(channel, MAXIMUM_PACKET_BYTES)
    except ConnectionError:
        return None
    if not packet:
        return None
    try:
        return decode_event(packet)
    except msgspec.DecodeError as error:
        raise ZygoteError(f"the zygote sent what is no event: {error}") from error
