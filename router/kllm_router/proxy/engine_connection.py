"""One HTTP/1.1 connection to an engine."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, cast

import httptools

from kllm_router.exceptions import (
    ConnectionBrokenError,
    IdleClosedError,
    ProtocolError,
    ResponseTooLargeError,
    StalledError,
    UpstreamError,
)

if TYPE_CHECKING:
    from kllm_router.proxy.upstream import EngineCall, EngineClient

Key = tuple[str, int, int]
"""Host, port and incarnation."""


class EngineConnection(asyncio.Protocol):
    """One connection; serves one call at a time."""

    def __init__(self, client: EngineClient, key: Key) -> None:
        self.key = key
        self.idle_since = 0.0
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._call: EngineCall | None = None
        self._payload = b""
        self._served = 0
        self._heard = False
        self._last_activity = 0.0
        self._paused = False
        self._complete = False
        self._chunked = False
        self._sized = False
        self._keep_alive = False
        self._content_type = ""
        self._parts: list[bytes] = []
        self._whole = 0
        self._pending_bytes = 0

    # --- for calls

    def send(self, call: EngineCall, payload: bytes) -> None:
        """Begin a call."""
        self._call = call
        self._heard = False
        self._complete = False
        self._last_activity = time.monotonic()
        self._client.active.add(self)
        assert self._transport is not None  # noqa: S101  connected before it is handed out
        self._transport.write(payload)

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again; the stall clock begins anew."""
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._last_activity = time.monotonic()
            self._transport.resume_reading()

    def close(self) -> None:
        """Close at once, whatever is in flight."""
        self._call = None
        self._client.forget(self)
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether it can take another call."""
        return self._transport is not None and not self._transport.is_closing()

    def check_stall(self, now: float) -> None:
        """Fail a call whose stream has begun and then stopped for too long, or that the engine has lost."""
        call = self._call
        if call is None or self._paused:
            return
        quiet = now - self._last_activity
        if quiet <= call.silence_seconds:
            return
        if (self._heard and quiet > call.stall_seconds) or call.is_lost(quiet):
            self._fail(StalledError(f"the engine sent nothing for {quiet:.1f} seconds", unheard_seconds=quiet))

    # --- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses of asyncio's
        set_no_delay(transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        call = self._call
        if call is None:
            self.close()  # nobody asked: the next answer could not be told from this
            return
        self._heard = True
        self._last_activity = time.monotonic()
        try:
            self._parser.feed_data(data)
            self._deliver(call)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, UpstreamError) else ProtocolError(f"not HTTP/1.1: {error}"))
        except UpstreamError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._client.forget(self)
        call, self._call = self._call, None
        if call is None or call.receiver is None:
            return
        why = f": {exc}" if exc is not None else ""
        if not self._served or self._heard:
            call.lost(ConnectionBrokenError(f"the engine closed the connection{why}"))
        elif call.idempotent:
            call.retry()
        else:
            # Sent again, the request could meet itself in the engine.
            call.lost(IdleClosedError(f"the engine closed a kept connection{why}"))

    def _fail(self, error: UpstreamError) -> None:
        call = self._call
        self.close()
        if call is not None:
            call.lost(error)

    def _deliver(self, call: EngineCall) -> None:
        parts = self._parts
        if parts:
            ready = self._whole if self._chunked else len(parts)
            if ready:
                data = parts[0] if ready == 1 else b"".join(parts[:ready])
                del parts[:ready]
                self._whole = 0
                self._pending_bytes = 0
                if call.receiver is not None:
                    call.receiver.on_data(data)
        if self._complete and self._call is call:
            self._call = None
            self._served += 1
            self._client.release(self, reusable=self._keep_alive)
            call.finished()

    # --- from the parser

    def on_message_begin(self) -> None:
        """A response begins."""
        if self._complete or self._call is None:
            raise ProtocolError("the engine sent more than one answer to one request")
        self._chunked = self._sized = False
        self._content_type = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower == b"transfer-encoding":
            self._chunked = True
        elif lower == b"content-length":
            self._sized = True

    def on_headers_complete(self) -> None:
        """All headers are there."""
        if not (self._chunked or self._sized):
            raise ProtocolError("the engine's answer has neither Content-Length nor Transfer-Encoding")
        self._keep_alive = self._parser.should_keep_alive()  # only now: the parser forgets it at the end
        if self._call is not None and self._call.receiver is not None:
            self._call.receiver.on_head(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._parts.append(body)
        self._pending_bytes += len(body)
        if self._pending_bytes > self._client.settings.pool.response_bytes:
            raise ResponseTooLargeError(f"one event is larger than {self._client.settings.pool.response_bytes} bytes")

    def on_chunk_complete(self) -> None:
        """All of an HTTP chunk is there."""
        self._whole = len(self._parts)

    def on_message_complete(self) -> None:
        """All of the response is there."""
        self._complete = True


def set_no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small writes at once: headers, first chunk and single tokens are small."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in {socket.AF_INET, socket.AF_INET6}:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
