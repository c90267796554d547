"""Requests to engines, and a pool of idle connections."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kllm_core.authentication import bearer
from kllm_router.exceptions import ConnectError, ResponseTooLargeError, UpstreamError
from kllm_router.proxy.engine_connection import EngineConnection, Key

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint
    from kllm_router.settings import Settings


class Receiver(Protocol):
    """Takes one response. The calls come in this order; `on_end` or `on_lost` is the last one."""

    def on_head(self, status: int, content_type: str) -> None:
        """Status and headers are there."""

    def on_data(self, data: bytes) -> None:
        """Body bytes: whole HTTP chunks if the body is chunked."""

    def on_end(self) -> None:
        """The response is complete."""

    def on_lost(self, error: UpstreamError) -> None:
        """It will never be complete."""


Suspect = Callable[[float], bool]
"""Whether a request seems to be lost that was silent for so many seconds."""
_SURE_SECONDS = 0.4
"""A suspicion must last so long: news may be on their way."""


class Response(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


class Collector:
    """A receiver that gathers the whole response; `outcome` is it, or why there is none."""

    def __init__(self, limit: int) -> None:
        self.outcome: asyncio.Future[Response | UpstreamError] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._status = 0
        self._size = 0
        self._parts: list[bytes] = []

    def on_head(self, status: int, content_type: str) -> None:  # noqa: ARG002
        """See `Receiver`."""
        self._status = status

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        self._size += len(data)
        if self._size > self._limit:
            raise ResponseTooLargeError(f"the engine's answer is larger than {self._limit} bytes")
        self._parts.append(data)

    def on_end(self) -> None:
        """See `Receiver`."""
        if not self.outcome.done():
            self.outcome.set_result(Response(self._status, b"".join(self._parts)))

    def on_lost(self, error: UpstreamError) -> None:
        """See `Receiver`."""
        if not self.outcome.done():
            self.outcome.set_result(error)


class EngineCall:
    """One request on an engine, from the moment it is made until its response is complete or given up.

    Attributes:
        receiver: None once nothing more will be told.
        idempotent: it may be sent twice.
        silence_seconds: without a byte, until `is_lost` is asked.
        stall_seconds: without a byte, until it is given up in any case.
    """

    __slots__ = (
        "_client",
        "_connecting",
        "_connection",
        "_endpoint",
        "_paused",
        "_payload",
        "_suspect",
        "_suspected",
        "idempotent",
        "receiver",
        "silence_seconds",
        "stall_seconds",
    )

    def __init__(
        self, client: EngineClient, endpoint: Endpoint, payload: bytes, *, receiver: Receiver, suspect: Suspect | None
    ) -> None:
        self.receiver: Receiver | None = receiver
        self.stall_seconds = client.settings.timeouts.stall
        self.silence_seconds = min(client.settings.timeouts.silence, self.stall_seconds)
        self.idempotent = suspect is None
        self._suspect = suspect
        self._suspected = math.inf
        self._client = client
        self._endpoint = endpoint
        self._payload = payload
        self._connection: EngineConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False

    def start(self) -> None:
        """Send on an idle connection, else connect first."""
        idle = self._client.take_idle(self._endpoint)
        if idle is not None:
            self._send(idle)
        else:
            self._connecting = self._client.spawn(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self._client.connect(self._endpoint)
        except UpstreamError as error:
            self.lost(error)
            return
        if self.receiver is None:
            connection.close()
            return
        self._send(connection)

    def _send(self, connection: EngineConnection) -> None:
        self._connection = connection
        connection.send(self, self._payload)
        if self._paused:
            connection.pause()

    def retry(self) -> None:
        """Send again on a fresh connection: the engine had closed the idle one that was used."""
        self._connection = None
        self._connecting = self._client.spawn(self._connect())

    def finished(self) -> None:
        """The connection has delivered everything and serves others now."""
        receiver, self.receiver, self._connection, self._payload = self.receiver, None, None, b""
        self._suspect = None
        if receiver is not None:
            receiver.on_end()

    def lost(self, error: UpstreamError) -> None:
        """The connection is gone."""
        receiver, self.receiver, self._connection = self.receiver, None, None
        self._suspect = None
        if receiver is not None:
            receiver.on_lost(error)

    def is_lost(self, quiet_seconds: float) -> bool:
        """Whether the engine no longer has the request, as far as its load has shown for a moment."""
        if self._suspect is None or not self._suspect(quiet_seconds):
            self._suspected = math.inf
            return False
        self._suspected = min(self._suspected, quiet_seconds)
        return quiet_seconds - self._suspected >= _SURE_SECONDS

    def pause(self) -> None:
        """Read nothing more until `resume`."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """Give up: the connection is closed, the receiver hears nothing more. Harmless when complete."""
        self.receiver = self._suspect = None
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class EngineClient:
    """Sends requests to engines and keeps idle connections, per engine process."""

    def __init__(self, settings: Settings, *, token: str) -> None:
        self.settings = settings
        self.active: set[EngineConnection] = set()
        self._idle: defaultdict[Key, list[EngineConnection]] = defaultdict(list)
        self._head = (
            f"authorization: {bearer(token)}\r\ncontent-type: application/json\r\naccept: */*\r\ncontent-length: "
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        receiver: Receiver,
        suspect: Suspect | None = None,
        trace: str = "",
    ) -> EngineCall:
        """POST a JSON body; everything that happens then is told to the receiver.

        Args:
            endpoint: the engine.
            path: of its API.
            body: JSON.
            receiver: takes the answer.
            suspect: asked about a silent engine. Without it only the stall limit counts, and the request may be sent
                twice.
            trace: header lines of a trace context, each with its end.
        """
        host = f"{endpoint.http_host}:{endpoint.http_port}"
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{trace}{self._head}{len(body)}\r\n\r\n"
        call = EngineCall(self, endpoint, head.encode("latin-1") + body, receiver=receiver, suspect=suspect)
        call.start()
        return call

    async def request(self, endpoint: Endpoint, path: str, body: bytes, *, timeout_seconds: float) -> Response:
        """POST a JSON body and read the whole response.

        Raises:
            UpstreamError: there is none.
            TimeoutError: there is none in time.
        """
        collector = Collector(self.settings.pool.response_bytes)
        call = self.call(endpoint, path, body, receiver=collector)
        try:
            async with asyncio.timeout(timeout_seconds):
                outcome = await collector.outcome
        finally:
            call.close()
        if isinstance(outcome, UpstreamError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Close every connection, busy ones too."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for connection in [*self.active, *(c for idle in self._idle.values() for c in idle)]:
            connection.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sweep(self, now: float) -> None:
        """Close what was idle for too long, fail what stalled. `now` is monotonic."""
        oldest = now - self.settings.pool.idle_seconds
        for key, idle in list(self._idle.items()):
            # Connections are taken from the end, so the oldest ones stand first.
            while idle and idle[0].idle_since < oldest:
                idle[0].close()
            if not idle:
                self._idle.pop(key, None)
        for connection in list(self.active):
            connection.check_stall(now)

    # --- for calls and connections

    def spawn(self, coroutine: asyncio._CoroutineLike[None]) -> asyncio.Task[None]:
        """Run something that outlives its caller."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def connect(self, endpoint: Endpoint) -> EngineConnection:
        """Open a connection.

        Raises:
            ConnectError: within the time allowed there is none.
        """
        where = f"{endpoint.instance_id} at {endpoint.http_host}:{endpoint.http_port}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.settings.timeouts.connect):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self, _key(endpoint)), endpoint.http_host, endpoint.http_port
                )
        except TimeoutError as error:
            raise ConnectError(f"no connection to {where} within {self.settings.timeouts.connect:g} seconds") from error
        except OSError as error:
            raise ConnectError(f"no connection to {where}: {error.strerror or error}") from error
        return connection

    def take_idle(self, endpoint: Endpoint) -> EngineConnection | None:
        """The idle connection that was used last, if it can still be used."""
        idle = self._idle.get(_key(endpoint))
        oldest = time.monotonic() - self.settings.pool.idle_seconds
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    def release(self, connection: EngineConnection, *, reusable: bool) -> None:
        """A connection has finished its call."""
        self.active.discard(connection)
        idle = self._idle[connection.key]
        if reusable and not self._closed and connection.usable and len(idle) < self.settings.pool.idle_per_engine:
            connection.resume()
            connection.idle_since = time.monotonic()
            idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: EngineConnection) -> None:
        """A connection is closed."""
        self.active.discard(connection)
        idle = self._idle.get(connection.key)
        if idle and connection in idle:
            idle.remove(connection)


def _key(endpoint: Endpoint) -> Key:
    return endpoint.http_host, endpoint.http_port, endpoint.incarnation
