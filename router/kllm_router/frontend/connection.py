"""One client's connection: HTTP/1.1 in, limits, timeouts and disconnects."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from kllm_router.frontend.http import HttpRequest, HttpResponse, Responder
from kllm_router.interfaces import ApiError
from kllm_router.proxy.engine_connection import set_no_delay

if TYPE_CHECKING:
    from kllm_router.settings import HttpLimits

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGER_BYTES = 64 * 1024 * 1024
"""Dropped, not kept: clients that send a body before they read find the refusal only then."""
_SHORT_BODY_BYTES = 64 * 1024


class Application(Protocol):
    """What answers requests."""

    def admit(self, request: HttpRequest) -> HttpResponse | None:
        """Look at a request's head before its body is read; a response refuses it."""
        ...

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer a request. Cancelled when the client leaves."""
        ...

    def refuse(self, error: ApiError) -> HttpResponse:
        """The response for what is not even a request."""
        ...

    def cut(self, responder: Responder) -> None:
        """Say why an answer in work ends now."""
        ...


class Owner(Protocol):
    """The server that a connection belongs to."""

    limits: HttpLimits
    application: Application
    connections: set[HttpConnection]

    @property
    def closing(self) -> bool:
        """Whether connections shall end after the request in work."""
        ...

    def opened(self, connection: HttpConnection) -> None:
        """Take it into `connections`."""
        ...

    def closed(self, connection: HttpConnection) -> None:
        """Take it out of `connections`."""
        ...


class _Reading(enum.Enum):
    """What the next byte belongs to."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class HttpConnection(asyncio.Protocol):
    """Reads requests, has them answered one after the other, and cancels the answer when the client leaves."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._limits = owner.limits
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest | HttpResponse] = deque()
        self._task: asyncio.Task[None] | None = None
        self._responder: Responder | None = None
        self._client = ""
        self._reading = _Reading.NOTHING
        self._read_deadline = math.inf
        self._write_deadline = math.inf
        self._read_paused = False
        self._deaf = False  # nothing that comes is parsed any more
        self._lingered = 0
        self._head_bytes = 0  # as they were read: bounds a head that never ends
        self._field_bytes = 0  # as they were parsed: bounds a head that came in one read
        self._header_count = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._host_count = 0
        self._request: HttpRequest | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    # --- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        set_no_delay(transport)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if peer else ""
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._owner.opened(self)
        self._read_deadline = time.monotonic() + self._limits.head_seconds
        if len(self._owner.connections) > self._limits.connections:
            self._refuse(ApiError(503, "the router has too many connections", type="server_error", retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._deaf:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES and self._transport is not None and self._task is None:
                self._transport.abort()
            return
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._parsing_failed(error)
            return
        if self._reading is _Reading.HEAD and self._head_bytes > self._limits.head_bytes:
            self._refuse(self._head_too_large())

    def eof_received(self) -> bool:
        """A client that sends no more is taken as gone; what it was waiting for is freed at once."""
        if self._transport is not None and self._task is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.Protocol`."""
        self._owner.closed(self)
        self._transport = None
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client is slow."""
        self._write_deadline = time.monotonic() + self._limits.write_stall_seconds
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_deadline = math.inf
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()
        self._next()

    # --- from the server

    def check_deadlines(self, now: float) -> None:
        """Act on what took too long; `now` is monotonic."""
        if self._transport is None:
            return
        if now > self._write_deadline:
            self._transport.abort()
        elif now > self._read_deadline:
            self._read_deadline = math.inf
            if self._deaf:
                self._linger_longer(now)
            elif self._reading is _Reading.NOTHING:
                self._transport.close()
            else:
                part = "headers" if self._reading is _Reading.HEAD else "body"
                self._refuse(ApiError(408, f"the request's {part} took too long", code="request_timeout"))

    def close_when_idle(self) -> None:
        """End after the request in work, at once if there is none."""
        if self._task is None and not self._waiting and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End now."""
        if self._transport is not None:
            self._transport.abort()

    def cut(self) -> None:
        """End now; whoever waits for an answer is told why."""
        if self._transport is None:
            return
        if self._responder is not None:
            self._owner.application.cut(self._responder)
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The answer in work."""
        return self._task

    # --- from the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reading = _Reading.HEAD
        self._read_deadline = time.monotonic() + self._limits.head_seconds
        self._head_bytes = 0
        self._field_bytes = 0
        self._header_count = 0
        self._target = b""
        self._headers = {}
        self._host_count = 0
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Some of the target."""
        self._target += url
        if len(self._target) > self._limits.head_bytes:
            raise ApiError(414, "the request target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header or trailer."""
        self._header_count += 1
        self._field_bytes += len(name) + len(value)
        if self._header_count > self._limits.header_count or self._field_bytes > self._limits.head_bytes:
            raise self._head_too_large()
        if self._reading is not _Reading.HEAD:
            return  # trailers are counted and dropped
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        if key == "host":
            self._host_count += 1
        before = self._headers.get(key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        """The head is complete: refuse before the body is read what would be refused after."""
        now = time.monotonic()
        version = self._parser.get_http_version()
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=self._target.decode("latin-1").partition("?")[0],
            headers=self._headers,
            http_1_0=version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
            arrived=now,
            client=self._client,
        )
        self._check_head(request, version)
        request.refusal = self._owner.application.admit(request)
        if request.refusal is not None and not self._body_is_short():
            raise _RefusedError(request.refusal)
        if "expect" in self._headers and version == "1.1" and self._task is None and self._transport is not None:
            self._transport.write(_CONTINUE)
        self._request = request
        self._reading = _Reading.BODY
        self._read_deadline = now + self._limits.body_seconds

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            raise self._body_too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        request, self._request = self._request, None
        self._reading = _Reading.NOTHING
        self._read_deadline = math.inf
        if request is None:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if not request.keep_alive:
            self._deaf = True
        self._waiting.append(request)
        self._next()
        if len(self._waiting) > self._limits.pipelined and self._transport is not None and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    # --- inside

    def _check_head(self, request: HttpRequest, version: str) -> None:
        headers = self._headers
        if version not in {"1.1", "1.0"}:
            raise ApiError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if self._host_count > 1 or (self._host_count == 0 and version == "1.1"):
            raise ApiError(400, "exactly one Host header is needed")
        coding = headers.get("transfer-encoding")
        if coding is not None and (coding.strip().lower() != "chunked" or version == "1.0"):
            framed = version == "1.1" and coding.rpartition(",")[2].strip().lower() == "chunked"
            raise ApiError(501 if framed else 400, "the only Transfer-Encoding here is chunked, in HTTP/1.1")
        if self._parser.should_upgrade() or request.method == "CONNECT":
            raise ApiError(400, "this server does not upgrade connections; use HTTP/1.1 without Upgrade")
        expected = headers.get("expect")
        if expected is not None and expected.lower() != "100-continue":
            raise ApiError(417, "the only expectation met here is 100-continue")
        length = headers.get("content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise self._body_too_large()

    def _body_is_short(self) -> bool:
        """Whether reading the body of a refused request costs less than a new connection."""
        headers = self._headers
        if "transfer-encoding" in headers or "expect" in headers:
            return False
        return int(headers.get("content-length", "0")) <= _SHORT_BODY_BYTES

    def _head_too_large(self) -> ApiError:
        limits = self._limits
        return ApiError(431, f"headers are limited to {limits.head_bytes} bytes in {limits.header_count} lines")

    def _body_too_large(self) -> ApiError:
        return ApiError(
            413, f"the request body is limited to {self._limits.body_bytes} bytes", code="request_too_large"
        )

    def _parsing_failed(self, error: httptools.HttpParserError) -> None:
        if self._deaf:
            return  # input after the last request of a connection
        cause = error.__context__
        if isinstance(cause, _RefusedError):
            self._refuse_with(cause.response)
        elif isinstance(cause, ApiError):
            self._refuse(cause)
        elif isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            self.abort()
            raise cause
        else:
            self._refuse(ApiError(400, f"this is not a valid HTTP/1.1 request: {error}"))

    def _refuse(self, error: ApiError) -> None:
        self._refuse_with(self._owner.application.refuse(error))

    def _refuse_with(self, response: HttpResponse) -> None:
        """Answer with an error after the requests before it, then close; parse nothing more."""
        self._deaf = True
        self._request = None
        self._body = []
        self._reading = _Reading.NOTHING
        self._read_deadline = math.inf
        self._waiting.append(response)
        self._next()

    def _next(self) -> None:
        """Begin to answer what waits, unless something is being answered or the client takes nothing."""
        while self._waiting and self._task is None and self._write_deadline == math.inf:
            transport = self._transport
            if transport is None:
                return
            item = self._waiting.popleft()
            if isinstance(item, HttpResponse):
                Responder(transport, None).send(item)
                self._linger()
                return
            if self._read_paused and len(self._waiting) <= self._limits.pipelined // 2:
                self._read_paused = False
                transport.resume_reading()
            self._begin(transport, item)

    def _begin(self, transport: asyncio.Transport, request: HttpRequest) -> None:
        responder = Responder(transport, request)
        if self._owner.closing:
            responder.keep_alive = False
        if request.refusal is not None:
            responder.send(request.refusal)
            self._complete(responder)
            return
        self._responder = responder
        self._task = asyncio.get_running_loop().create_task(self._owner.application.handle(request, responder))
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        responder = self._responder
        self._task = self._responder = None
        if self._transport is None:
            if not task.cancelled():
                task.exception()  # the application has logged it; here it only counts as seen
            return
        if responder is None or not responder.finished:
            self._transport.abort()  # a cut stream must not look like a complete one
            return
        if task.cancelled() or task.exception() is not None:
            self._transport.close()
            return
        self._complete(responder)
        self._next()

    def _complete(self, responder: Responder) -> None:
        """An answer is written to its end."""
        if not responder.keep_alive or self._owner.closing:
            self._deaf = True
            self._waiting.clear()
            self._linger()
        elif not self._waiting and self._reading is _Reading.NOTHING:
            self._read_deadline = time.monotonic() + self._limits.keep_alive_seconds

    def _linger_longer(self, now: float) -> None:
        """The client did not close: end it, unless it is still taking the answer."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() == 0:
            self._transport.abort()
            return
        self._read_deadline = now + self._limits.linger_seconds
        self._write_deadline = min(self._write_deadline, now + self._limits.write_stall_seconds)

    def _linger(self) -> None:
        """Close for writing, but read on for a moment: unread input would make the kernel drop the answer."""
        if self._transport is None:
            return
        self._read_deadline = time.monotonic() + self._limits.linger_seconds
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


class _RefusedError(Exception):
    """The application refused a head."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status)
        self.response = response
