"""HTTP/1.1 messages between a client's connection and the application."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from kllm_router.frontend.keys import EVERYONE, ApiKey
from kllm_router.frontend.trace import NO_TRACE, Trace

if TYPE_CHECKING:
    import asyncio

JSON = "application/json"
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


@dataclass(slots=True)
class HttpRequest:
    """One request.

    Attributes:
        headers: by lower-case name; the values of a repeated header are joined with ", ".
        arrived: when its head was complete, on the monotonic clock.
        client: address that it came from.
        key: the client's, once it was found to be valid.
        trace: that it belongs to.
        refusal: the answer that its head already deserved.
    """

    method: str
    path: str
    headers: dict[str, str]
    http_1_0: bool = False
    keep_alive: bool = True
    body: bytes = b""
    arrived: float = field(default_factory=time.monotonic)
    client: str = ""
    key: ApiKey = EVERYONE
    trace: Trace = NO_TRACE
    refusal: HttpResponse | None = None


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: Sequence[tuple[str, str]] = ()


class Responder:
    """Writes one response, whole or as a stream.

    Attributes:
        started: the head is written, so that the status can no longer change.
        finished: nothing more can be written.
        on_pause: called when the client takes nothing for now.
        on_resume: called when it takes again.
    """

    __slots__ = (
        "_chunked",
        "_headers_only",
        "_transport",
        "finished",
        "keep_alive",
        "on_pause",
        "on_resume",
        "started",
    )

    def __init__(self, transport: asyncio.Transport, request: HttpRequest | None) -> None:
        self.started = False
        self.finished = False
        self.keep_alive = request.keep_alive if request is not None else False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._transport = transport
        self._chunked = request is None or not request.http_1_0
        self._headers_only = request is not None and request.method == "HEAD"

    def send(self, response: HttpResponse) -> None:
        """Write a whole response; ignored when one has begun."""
        if self.started:
            return
        self.started = self.finished = True
        without_body = response.status in _WITHOUT_BODY
        length = "" if without_body else f"content-length: {len(response.body)}\r\n"
        head = self._head(response.status, "" if without_body else response.content_type, response.headers, length)
        self._transport.write(head if self._headers_only or without_body else head + response.body)

    def begin(self, content_type: str, headers: Sequence[tuple[str, str]]) -> None:
        """Write the head of a stream. It leaves together with what follows in the same step of the loop."""
        self.started = True
        if not self._chunked:
            self.keep_alive = False
        framing = "transfer-encoding: chunked\r\n" if self._chunked else ""
        self._transport.write(self._head(200, content_type, headers, framing))

    def write(self, data: bytes) -> None:
        """Write a part of a stream."""
        if self.finished or not data:
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """End a stream."""
        if self.finished:
            return
        self.finished = True
        self.on_pause = self.on_resume = None
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

    def _head(self, status: int, content_type: str, headers: Sequence[tuple[str, str]], framing: str) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        kind = f"content-type: {content_type}\r\n" if content_type else ""
        connection = "" if self.keep_alive else "connection: close\r\n"
        if self.keep_alive and not self._chunked:
            connection = "connection: keep-alive\r\n"
        reason = _REASONS.get(status, "")
        head = f"HTTP/1.1 {status} {reason}\r\ndate: {_Date.now()}\r\n{kind}{framing}{lines}{connection}\r\n"
        return head.encode("latin-1", "replace")


class _Date:
    """The Date header, written once a second."""

    _second = 0
    _text = ""

    @classmethod
    def now(cls) -> str:
        second = int(time.time())
        if second != cls._second:
            cls._second = second
            cls._text = formatdate(second, usegmt=True)
        return cls._text
