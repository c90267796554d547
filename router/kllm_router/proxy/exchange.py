"""The life of one request: attempts until one begins to answer, and a stream that goes on where it broke."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import orjson
import structlog

from kllm_core.objectives import Binding
from kllm_router.interfaces import ApiError, RequestSummary, StageTimes, Usage
from kllm_router.proxy import errors
from kllm_router.proxy.attempt import Attempt
from kllm_router.proxy.progress import Progress
from kllm_router.proxy.relay import Relay, Sink
from kllm_router.proxy.setback import Setback
from kllm_router.proxy.transcript import Rewriting, Transcript
from kllm_router.rids import new_rid

if TYPE_CHECKING:
    from kllm_router.interfaces import EngineRequest
    from kllm_router.proxy.pairing import Pairing
    from kllm_router.proxy.sides import DecodeSide, PrefillSide

_log = structlog.get_logger(__name__)

CLIENT_LEFT = 499
_CHUNKS_UNREAD = 64


class Exchange:
    """One request and its answer. Use it as an async context manager, once.

    Attributes:
        request: as the client asked, with the id that it is shown.
        progress: of the attempt that gave the first byte.
        summary: how it ended; None before.
    """

    def __init__(
        self, pairing: Pairing, request: EngineRequest, *, arrived: float, timing: bool, deadline_seconds: float | None
    ) -> None:
        self.request = request
        self.progress = Progress(arrived)
        self.summary: RequestSummary | None = None
        self._pairing = pairing
        self._settings = pairing.settings
        self._recovery = pairing.recovery()
        self._limit = _Limit.of(pairing.settings.timeouts.total, deadline_seconds)
        self._deadline = asyncio.get_running_loop().time() + self._limit.seconds - (time.monotonic() - arrived)
        self._timing = timing
        self._transcript = Transcript(self._settings.recovery.kept_bytes) if self._may_go_on() else None
        self._attempt: Attempt | None = None
        self._created: bytes | None = None
        self._completed = False
        self._paused = False
        self._ended = False
        self._status = 200

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._run(self.request, self.progress)
        except TimeoutError:
            error = self._limit.error()
            self._end(error)
            raise error from None
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    # --- the answer

    @property
    def prefill(self) -> PrefillSide | None:
        """Where the prompt was computed last; None before it was chosen."""
        return None if self._attempt is None else self._attempt.prefill

    @property
    def decode(self) -> DecodeSide | None:
        """Where the answer comes from; None before it was chosen."""
        return None if self._attempt is None else self._attempt.decode

    @property
    def binding(self) -> Binding:
        """When the decode instance was chosen."""
        return Binding.LATE if self._attempt is None else self._attempt.binding

    @property
    def content_type(self) -> str:
        """Of the answer."""
        return self._relay.content_type or "application/json"

    @property
    def streaming(self) -> bool:
        """Whether the answer is a stream; otherwise `body` is all of it."""
        return self.request.stream

    @property
    def complete(self) -> bool:
        """Whether the client has been told the end of its stream."""
        return self._completed or (self.decode is not None and self.decode.clean)

    @property
    def body(self) -> bytes:
        """The whole answer of a request that is not streamed."""
        return self._rewriting()(self._relay.peek())

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What is known of the request when its first byte is there."""
        headers = [("x-kllm-binding", self.binding.value)]
        headers += [(f"x-kllm-{side.role}", side.endpoint.instance_id) for side in (self.prefill, self.decode) if side]
        headers += [(f"x-kllm-{name}-seconds", f"{seconds:.6f}") for name, seconds in self.progress.known()]
        if self.progress.cached_tokens is not None:
            headers.append(("x-kllm-cached-tokens", str(self.progress.cached_tokens)))
        if self._recovery.attempts > 1:
            headers.append(("x-kllm-attempts", str(self._recovery.attempts)))
        return headers

    @property
    def times(self) -> StageTimes:
        """Stage times; those of the end are known after the end."""
        return self.progress.times(self.usage.completion_tokens)

    @property
    def usage(self) -> Usage:
        """Tokens, as far as they are known."""
        told = self.decode.relay.usage if self.decode is not None else Usage()
        progress = self.progress
        return Usage(
            prompt_tokens=len(self.request.input_ids) if told.prompt_tokens is None else told.prompt_tokens,
            completion_tokens=told.completion_tokens,
            cached_tokens=progress.cached_tokens if told.cached_tokens is None else told.cached_tokens,
        )

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated, of a stream that broke those that the client was told."""
        told = self.usage.completion_tokens
        if told is None:
            return 0 if self._transcript is None else self._transcript.tokens
        return told

    async def relay(self, sink: Sink) -> ApiError | None:
        """Give the stream's events to `sink` as they come, until its end; return why it broke, if it did."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._relay_all(sink)
        except TimeoutError:
            error = self._limit.error()
        except ApiError as raised:
            error = raised
        else:
            return None
        self._status = error.status
        return error

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream's events, for callers that would rather wait for each part.

        Raises:
            ApiError: the stream broke.
        """
        parts: asyncio.Queue[bytes] = asyncio.Queue()

        def put(data: bytes) -> None:
            parts.put_nowait(data)
            if parts.qsize() > _CHUNKS_UNREAD:
                self.pause()

        relaying = asyncio.ensure_future(self.relay(put))
        relaying.add_done_callback(lambda _: parts.put_nowait(b""))
        try:
            while part := await parts.get():
                yield part
                if parts.empty():
                    self.resume()
            error = await relaying
        finally:
            relaying.cancel()
        if error is not None:
            raise error

    def pause(self) -> None:
        """The client is slow: read nothing more from the engine for now."""
        self._paused = True
        if self.decode is not None:
            self.decode.relay.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._paused = False
        if self.decode is not None:
            self.decode.relay.resume()

    # --- attempts

    async def _run(self, request: EngineRequest, progress: Progress) -> None:
        """Try until one attempt has begun to answer."""
        while True:
            attempt = self._attempt = self._pairing.attempt(request, progress, new_relay=self._new_relay)
            try:
                await attempt.run(self._recovery)
            except Setback as setback:
                attempt.end()
                self._recovery.failed(setback, attempt.pair)
                _log.info("retrying", rid=self.request.rid, cause=setback.cause.value, why=str(setback))
                request = dataclasses.replace(request, rid=new_rid())
                first, progress = progress is self.progress, progress.again()
                if first:
                    self.progress = progress
                continue
            self._recovery.served(attempt.pair)
            return

    async def _relay_all(self, sink: Sink) -> None:
        while True:
            relay = self._relay
            relay.attach(sink)
            if self._paused:
                relay.pause()
            await relay.done
            if self._ended:
                return  # nobody reads any more
            fault = self.decode.fault() if self.decode is not None else None
            if fault is None:
                return
            if isinstance(fault, ApiError):
                raise fault
            if await self._go_on(fault, sink):
                return

    async def _go_on(self, setback: Setback, sink: Sink) -> bool:
        """Go on with a stream that broke, on other instances; say whether it is complete already.

        Raises:
            ApiError: it cannot go on.
        """
        attempt, transcript = self._attempt, self._transcript
        if attempt is None or transcript is None:
            raise setback.error
        if transcript.finished:
            request = self.request
            sink(
                transcript.ending(
                    prompt_tokens=len(request.input_ids), path=request.path, include_usage=request.include_usage
                )
            )
            self._completed = True
            return True
        attempt.end()
        self._recovery.broke(setback, attempt.pair, resumable=transcript.resumable)
        ids = transcript.ids
        _log.info("continuing", rid=self.request.rid, cause=setback.cause.value, why=str(setback), tokens=len(ids))
        self._created = transcript.created()
        await self._run(_resumed(self.request, ids), Progress(time.monotonic()))
        return False

    def _new_relay(self) -> Relay:
        request = self.request
        relay = Relay(
            self._settings.pool,
            stream=request.stream,
            keep_usage=request.include_usage,
            transcript=self._transcript,
        )
        if self._timing:
            relay.comment = self._comment
        attempt = self._attempt
        if attempt is not None and attempt.request.rid != request.rid:
            relay.rewrite = self._rewriting()
        return relay

    def _rewriting(self) -> Rewriting:
        rid = self.request.rid if self._attempt is None else self._attempt.request.rid
        return Rewriting(rid, self.request.rid, self._created)

    def _may_go_on(self) -> bool:
        """Whether a broken stream can go on: text of the prompt in it would have to be told apart."""
        request = self.request
        return request.stream and self._settings.recovery.continue_streams and not request.body.get("echo")

    # --- the end

    def _end(self, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._attempt is not None:
            if self.decode is not None:
                self.progress.last_at = self.decode.relay.last_at
                if self.decode.clean and self.prefill is not None:
                    self._pairing.release(self.prefill, self._attempt.request.rid)
            self._attempt.end()
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if error is not None:
            self._status = error.status if isinstance(error, ApiError) else _status_of(error)
        self.summary = RequestSummary(
            rid=self.request.rid,
            path=self.request.path,
            status=self._status,
            stage=self.progress.stage.value,
            prefill_instance=self.prefill.endpoint.instance_id if self.prefill is not None else "",
            decode_instance=self.decode.endpoint.instance_id if self.decode is not None else "",
            attempts=self._recovery.attempts,
            continuations=self._recovery.continuations,
            times=self.times,
            usage=self.usage,
        )
        self._pairing.ended(self.summary)

    def _comment(self) -> bytes:
        relay = self._relay
        if self.progress.first_at is None:
            self.progress.first(relay.first_at)
        self.progress.last_at = relay.last_at
        return b": kllm " + orjson.dumps(self.times)

    @property
    def _relay(self) -> Relay:
        if self.decode is None:
            raise RuntimeError("no decode instance was chosen yet")
        return self.decode.relay


@dataclasses.dataclass(frozen=True)
class _Limit:
    """How long the whole request may take, and who says so."""

    seconds: float
    whose: str

    @classmethod
    def of(cls, total: float, asked: float | None) -> _Limit:
        if asked is not None and asked < total:
            return cls(asked, "the client's limit")
        return cls(total, "the router's limit")

    def error(self) -> ApiError:
        return errors.timed_out(f"the request took longer than {self.seconds:g} seconds, {self.whose}")


def _resumed(request: EngineRequest, ids: list[int]) -> EngineRequest:
    """The request as an engine that goes on with it gets it: the engine itself appends what was told already."""
    limit = request.max_new_tokens
    return dataclasses.replace(
        request,
        rid=new_rid(),
        body={**request.body, "kllm_resume_output_ids": ids},
        input_ids=[*request.input_ids, *ids],
        max_new_tokens=None if limit is None else max(1, limit - len(ids)),
    )


def _status_of(error: BaseException) -> int:
    left = isinstance(error, (asyncio.CancelledError, GeneratorExit))
    return CLIENT_LEFT if left else 500
