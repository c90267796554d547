"""The socket on which the engine's plugin reports to the agent."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from kllm_engine.agent.exceptions import DeadError
from kllm_engine.messages import MAXIMUM_MESSAGE_BYTES, Message, decode

_BACKLOG = 16

_log = structlog.get_logger(__name__)


class PluginLink:
    """Receives messages of one engine's processes and hands them on.

    Args:
        path: of the socket, in a directory that only this user can enter.
        handle: called with each message, in the order of arrival.
    """

    def __init__(self, path: Path, handle: Callable[[Message], None]) -> None:
        self._path = path
        self._handle = handle
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    async def run(self) -> None:
        """Accept and read until cancelled.

        Raises:
            DeadError: a message could not be handled, or nothing can be received any more. What the engine does from
                then on would be unknown, such as which requests it holds.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as readers:
                while True:
                    connection, _ = await loop.sock_accept(self._listener)
                    readers.create_task(self._read(connection))
        except ExceptionGroup as failures:
            _log.exception("the plugin is not heard any more")
            raise DeadError(f"the engine's plugin is not heard any more: {failures.exceptions[0]!r}") from failures
        finally:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    async def _read(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray(MAXIMUM_MESSAGE_BYTES)
        with connection:
            connection.setblocking(False)
            if _peer_user(connection) != os.getuid():
                _log.warning("another user connected to the plugin socket", user=_peer_user(connection))
                return
            while True:
                try:
                    size = await loop.sock_recv_into(connection, buffer)
                except ConnectionError as error:
                    _log.info("plugin connection lost", reason=str(error))
                    return
                if size == 0:
                    return
                self._take(bytes(buffer[:size]))

    def _take(self, packet: bytes) -> None:
        try:
            message = decode(packet)
        except msgspec.DecodeError as error:
            _log.warning("plugin message cannot be read", reason=str(error), size=len(packet))
            return
        self._handle(message)


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
