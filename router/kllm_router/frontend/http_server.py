"""Accepts clients, watches their deadlines, and ends them in good order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from kllm_router.frontend.connection import HttpConnection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from kllm_router.frontend.connection import Application
    from kllm_router.settings import Settings

BACKLOG = 1024


class HttpServer:
    """Listens for HTTP/1.1.

    Attributes:
        connections: those that are open.
    """

    def __init__(
        self, application: Application, settings: Settings, *, on_sweep: Callable[[float], None] | None = None
    ) -> None:
        self.application = application
        self.limits = settings.http
        self.connections: set[HttpConnection] = set()
        self._settings = settings
        self._on_sweep = on_sweep
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False
        self._empty = asyncio.Event()

    @property
    def closing(self) -> bool:
        """Whether connections shall end after the request in work."""
        return self._closing

    async def start(
        self, where: tuple[str, int] | socket.socket, *, tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen.

        Args:
            where: host and port, of which 0 takes any free one, or a socket that listens already.
            tls: None speaks plain HTTP.

        Returns:
            Where it listens.

        Raises:
            OSError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        limits = self.limits
        handshake: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": limits.head_seconds}
        if isinstance(where, socket.socket):
            at: dict[str, Any] = {"sock": where}
        else:
            at = {"host": where[0], "port": where[1]}
        self._server = await loop.create_server(lambda: HttpConnection(self), backlog=BACKLOG, **at, **handshake)
        self._sweeper = loop.create_task(self._sweep())
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def close(self, *, drain_seconds: float) -> bool:
        """Accept nothing more and let requests in work finish.

        Returns:
            Whether all of them did; the rest was cut.
        """
        self._closing = True
        if self._server is not None:
            self._server.close()
        deadline = time.monotonic() + drain_seconds
        for connection in list(self.connections):
            connection.close_when_idle()
        while (busy := self._busy()) and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(busy, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # lets the connections notice, and begin what was pipelined
        await self._flush(deadline)
        cut = self._busy()
        for connection in list(self.connections):
            connection.cut()
        if cut:
            await asyncio.wait(cut, timeout=1.0)
            await asyncio.sleep(0)  # lets transports write what cut answers were told
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        return not cut

    # --- for connections

    def opened(self, connection: HttpConnection) -> None:
        """A client has connected."""
        self.connections.add(connection)

    def closed(self, connection: HttpConnection) -> None:
        """A client is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    # --- inside

    async def _flush(self, deadline: float) -> None:
        # Answered connections linger until their clients have read the answer and closed.
        left = min(deadline - time.monotonic(), self.limits.linger_seconds)
        if self.connections and left > 0:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), left)

    def _busy(self) -> set[asyncio.Task[None]]:
        return {connection.task for connection in self.connections if connection.task is not None}

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_seconds)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check_deadlines(now)
            if self._on_sweep is not None:
                self._on_sweep(now)
