"""The answer of a decode instance on its way to the client: bytes pass as they come, usage is read in passing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from kllm_router.exceptions import ResponseTooLargeError, UpstreamError
from kllm_router.interfaces import Usage

if TYPE_CHECKING:
    from kllm_router.proxy.transcript import Transcript
    from kllm_router.proxy.upstream import EngineCall
    from kllm_router.settings import PoolLimits

Sink = Callable[[bytes], None]
"""Takes body bytes; must not wait and must not raise."""

# None of these can be inside a JSON string, where quotes and line ends are escaped.
_USAGE = b'"usage":{'
_DONE = b"data: [DONE]\n"
_ERROR = b'data: {"error"'

_ABORTED = b'data: {"error":{"message":"the engine gave the request up","code":503}}\n\n'

_COUNTS = {
    name: re.compile(rb'"' + name.encode() + rb'"\s*:\s*(\d+)')
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}


class Relay:
    """Receiver of one decode answer. Until a sink is attached, it keeps what comes, up to a bound.

    Only whole events of a stream are passed on, so that a stream can be cut, and go on elsewhere, between any two.

    Attributes:
        first: done when the first events of a stream are there, or the answer is complete or lost.
        done: done when the answer is complete or lost, and all of it was given to the sink.
        error: why it was lost, or None.
        failure: the event with which the engine told of an error; it and what follows are not passed on.
        complete: the end of the stream has been told to the client; only its framing may follow.
        first_at: when the first events came, on the monotonic clock.
        last_at: when the last bytes came.
        comment: gives one line for the client to insert before the end of the stream.
        transcript: notes token ids and what the client was told; None where a stream cannot go on.
        rewrite: makes the events look like those of an earlier attempt.
    """

    def __init__(
        self, limits: PoolLimits, *, stream: bool, keep_usage: bool, transcript: Transcript | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.content_type = ""
        self.error: UpstreamError | None = None
        self.failure = b""
        self.complete = False
        self.first_at: float | None = None
        self.last_at = 0.0
        self.usage = Usage()
        self.comment: Callable[[], bytes] | None = None
        self.call: EngineCall | None = None
        self.transcript = transcript
        self.rewrite: Callable[[bytes], bytes] | None = None
        self._limits = limits
        self._stream = stream
        self._keep_usage = keep_usage
        self._sink: Sink | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._part = b""
        self._tail = b""

    @property
    def streaming(self) -> bool:
        """Whether the answer is a stream that has begun well."""
        return self._stream and self.status == 200

    @property
    def clean(self) -> bool:
        """Whether the whole answer has come and was good."""
        if self._stream:
            return self.complete
        ended = self.call is not None and self.call.receiver is None and self.first.done()
        return ended and self.error is None and self.status == 200

    # --- receiver

    def on_head(self, status: int, content_type: str) -> None:
        """See `Receiver`."""
        self.status = status
        self.content_type = content_type

    def on_data(self, data: bytes) -> None:
        """See `Receiver`."""
        self.last_at = time.monotonic()
        if not self.streaming:
            self._keep(data)
            if self._kept_bytes > self._limits.response_bytes:
                raise ResponseTooLargeError(f"the engine's answer is larger than {self._limits.response_bytes} bytes")
            return
        if self.failure:
            return
        if self._part or not data.endswith(b"\n\n"):
            data = self._whole(data)
        if not data:
            return
        if _ERROR in data:
            data, self.failure = _split_failure(data)
        if self.first_at is None and data:
            self.first_at = self.last_at
        self._pass(data)
        if self.failure:
            self._stop()

    def on_end(self) -> None:
        """See `Receiver`."""
        self.usage = self._complete_usage()
        _finish(self.first)
        if self._sink is not None or not self.streaming:
            _finish(self.done)

    def on_lost(self, error: UpstreamError) -> None:
        """See `Receiver`."""
        self.error = error
        self.usage = self._complete_usage()
        _finish(self.first)
        _finish(self.done)

    # --- for the client's side

    def attach(self, sink: Sink) -> None:
        """Give everything to `sink`, beginning with what was kept."""
        self._sink = sink
        ended = self.first.done() and (self.call is None or self.call.receiver is None)
        if not ended and self.call is not None:
            self.call.resume()  # before the sink, which may pause it again
        kept = self.take()
        if kept:
            sink(kept)
            self.complete = _DONE in kept
        if ended:
            _finish(self.done)

    def detach(self) -> None:
        """Give nothing more to anyone, and hold nothing that holds this."""
        self._sink = _drop
        self.comment = None
        _finish(self.done)

    def take(self) -> bytes:
        """What was kept so far; it is kept no longer."""
        data = b"".join(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        return data

    def peek(self) -> bytes:
        """What was kept so far."""
        return b"".join(self._kept)

    def pause(self) -> None:
        """The client is slow: read nothing more from the engine."""
        if self.call is not None:
            self.call.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.call is not None:
            self.call.resume()

    # --- inside

    def _pass(self, data: bytes) -> None:
        """Give whole events to the client, or keep them."""
        self._tail = data or self._tail
        if self.rewrite is not None:
            data = self.rewrite(data)
        transcript = self.transcript
        if transcript is not None and data:
            data = transcript.take(data)
            if transcript.aborted:
                transcript.aborted, self.failure = False, _ABORTED
        if _USAGE in data:
            data = self._take_usage(data)
        ending = _DONE in data
        if self.comment is not None and ending:
            data = self._insert_comment(data, self.comment)
        if self._sink is not None:
            if data:
                self._sink(data)
            self.complete = self.complete or ending
            return
        self._keep(data)
        if self._kept_bytes > self._limits.unread_bytes and self.call is not None:
            self.call.pause()
        _finish(self.first)

    def _stop(self) -> None:
        """The engine has told of an error: nothing that follows is of use."""
        if self.call is not None:
            self.call.close()
        self.usage = self._complete_usage()
        _finish(self.first)
        if self._sink is not None:
            _finish(self.done)

    def _whole(self, data: bytes) -> bytes:
        """The events that are whole by now; the rest waits."""
        data = self._part + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = 0
        self._part = data[end:]
        if len(self._part) > self._limits.response_bytes:
            raise ResponseTooLargeError(f"one event is larger than {self._limits.response_bytes} bytes")
        return data[:end]

    def _keep(self, data: bytes) -> None:
        if data:
            self._kept.append(data)
            self._kept_bytes += len(data)

    def _take_usage(self, data: bytes) -> bytes:
        """Read the usage chunk; leave it out unless the client asked for it."""
        rest = []
        for event in data.split(b"\n\n"):
            usage = _final_usage(event) if _USAGE in event else None
            if usage is not None:
                self.usage = usage
            if usage is None or self._keep_usage:
                rest.append(event)
        return b"\n\n".join(rest)

    def _complete_usage(self) -> Usage:
        """Usage as the usage chunk told it, else from the last bytes of the answer."""
        if self.usage.completion_tokens is not None:
            return self.usage
        text = self._tail if self.streaming else self.peek()[-64 * 1024 :]
        return Usage(**{name: _last_number(pattern, text) for name, pattern in _COUNTS.items()})

    def _insert_comment(self, data: bytes, comment: Callable[[], bytes]) -> bytes:
        self.comment = None
        at = data.rfind(_DONE)
        return data[:at] + comment() + b"\n\n" + data[at:]


def _drop(data: bytes) -> None:
    del data


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _split_failure(data: bytes) -> tuple[bytes, bytes]:
    """What came before an error event, and the event."""
    at = data.find(b"\n" + _ERROR) + 1
    return data[:at], data[at:]


def _last_number(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def _final_usage(event: bytes) -> Usage | None:
    """Usage of a chunk that has no choices; None for any other event."""
    try:
        chunk: dict[str, Any] = orjson.loads(event.removeprefix(b"data: "))
    except orjson.JSONDecodeError:
        return None
    if chunk.get("choices") != []:
        return None
    usage = chunk.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=details.get("cached_tokens"),
    )
