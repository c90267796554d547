"""The life of one request: prefill on P, binding to D, and D's answer to the client.

`Pairing.open` gives an `Exchange`. Entering it runs the request up to the first byte of its answer; leaving it, for
whatever reason, frees both engines of all that did not finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson
import structlog

from kllm_core.objectives import Binding
from kllm_router.exceptions import UpstreamError
from kllm_router.interfaces import ApiError, RequestSummary, StageTimes, Usage
from kllm_router.proxy import errors
from kllm_router.proxy.progress import Progress, Stage
from kllm_router.proxy.relay import Relay, Sink
from kllm_router.proxy.sides import DecodeSide, PrefillSide, new_room

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint, EngineRequest, FleetView
    from kllm_router.metrics import RouterMetrics
    from kllm_router.proxy.upstream import EngineClient
    from kllm_router.settings import Settings

_log = structlog.get_logger(__name__)

CLIENT_LEFT = 499
_CHUNKS_UNREAD = 64


class Pairing:
    """Runs requests on pairs of engines; knows nothing of the client's protocol."""

    def __init__(self, fleet: FleetView, client: EngineClient, settings: Settings, metrics: RouterMetrics) -> None:
        self.fleet = fleet
        self.client = client
        self.settings = settings
        self.metrics = metrics
        self.listeners: list[Callable[[RequestSummary], None]] = [metrics.request_ended]
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def open(self, request: EngineRequest, *, arrived: float | None = None, timing: bool = False) -> Exchange:
        """Begin a request.

        Args:
            request: what to run.
            arrived: when the client's request arrived, on the monotonic clock; now, if left out.
            timing: add an SSE comment with the stage times before the end of a stream.
        """
        return Exchange(self, request, arrived=time.monotonic() if arrived is None else arrived, timing=timing)

    async def close(self) -> None:
        """Abort what prefill instances still hold, and wait for all aborts; each has its own timeout."""
        self._closing.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- for exchanges

    def abort(self, endpoint: Endpoint, rid: str) -> None:
        """Free `rid` on an engine, without waiting for it."""
        self._spawn(self._abort(endpoint, rid))

    def release(self, side: PrefillSide, rid: str) -> None:
        """Let P finish its own answer, which comes after the transfer; abort what takes too long."""
        if not side.outcome.done():
            self._spawn(self._release(side, rid))

    def _spawn(self, coroutine: asyncio._CoroutineLike[None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort(self, endpoint: Endpoint, rid: str) -> None:
        try:
            response = await self.client.request(
                endpoint, "/abort_request", orjson.dumps({"rid": rid}), timeout_seconds=self.settings.timeouts.abort
            )
        except (UpstreamError, TimeoutError) as error:
            self.metrics.aborted(endpoint.role, "failed")
            _log.warning("abort failed", rid=rid, instance=endpoint.instance_id, error=str(error) or "timeout")
            return
        self.metrics.aborted(endpoint.role, "accepted" if response.status == 200 else "refused")

    async def _release(self, side: PrefillSide, rid: str) -> None:
        closing = asyncio.ensure_future(self._closing.wait())
        waiting: set[asyncio.Future[Any]] = {side.outcome, closing}
        await asyncio.wait(
            waiting,
            timeout=self.settings.timeouts.release,
            return_when=asyncio.FIRST_COMPLETED,
        )
        closing.cancel()
        if not side.outcome.done():
            side.close()
            await self._abort(side.endpoint, rid)


class Exchange:
    """One request and its answer. Use it as an async context manager, once.

    Attributes:
        prefill: where its prompt was computed; None before it was chosen.
        decode: where its answer comes from; None before it was chosen.
    """

    def __init__(self, pairing: Pairing, request: EngineRequest, *, arrived: float, timing: bool) -> None:
        self.request = request
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self.binding = Binding.LATE
        self.progress = Progress(arrived)
        self._pairing = pairing
        self._timeouts = pairing.settings.timeouts
        self._deadline = asyncio.get_running_loop().time() + self._timeouts.total
        self._timing = timing
        self._ended = False
        self._status = 200

    async def __aenter__(self) -> Self:
        try:
            await self._run()
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
        return self.decode is not None and self.decode.clean

    @property
    def body(self) -> bytes:
        """The whole answer of a request that is not streamed."""
        return self._relay.peek()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What is known of the request when its first byte is there."""
        headers = [("x-kllm-binding", self.binding.value)]
        headers += [(f"x-kllm-{side.role}", side.endpoint.instance_id) for side in self._sides()]
        headers += [(f"x-kllm-{name}-seconds", f"{seconds:.6f}") for name, seconds in self.progress.known()]
        if self.progress.cached_tokens is not None:
            headers.append(("x-kllm-cached-tokens", str(self.progress.cached_tokens)))
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

    async def relay(self, sink: Sink) -> ApiError | None:
        """Give the stream's bytes to `sink` as they come, until its end; return why it broke, if it did."""
        relay = self._relay
        relay.attach(sink)
        try:
            async with asyncio.timeout_at(self._deadline):
                await relay.done
        except TimeoutError:
            error: ApiError | None = errors.timed_out(f"the request took longer than {self._timeouts.total:g} seconds")
        else:
            error = self._broken()
        if error is not None:
            self._status = error.status
        return error

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream's bytes, for callers that would rather wait for each part.

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
        self._relay.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._relay.resume()

    # --- the stages

    async def _run(self) -> None:
        fleet, request = self._pairing.fleet, self.request
        endpoint = fleet.choose_prefill(request)
        self.binding = fleet.binding(endpoint)
        room = new_room()
        with fleet.watch(request.rid, endpoint) as watch:
            side = self.prefill = PrefillSide(self._pairing.client, endpoint, request, room=room, watch=watch)
            fleet.started(request.rid, endpoint, len(request.input_ids))
            try:
                if self.binding is Binding.EARLY:
                    chosen = fleet.choose_decode(request, endpoint)
                    self._compute(side)
                    self._bind(side, chosen)
                else:
                    self._compute(side)
                    await self._until_parked(side)
                    self._bind(side, fleet.choose_decode(request, endpoint))
                await self._until_first(side)
            finally:
                side.stop_watching()
        fleet.finished(request.rid, endpoint)

    def _compute(self, side: PrefillSide) -> None:
        self.progress.enter(Stage.PREFILL)
        side.post()

    async def _until_parked(self, side: PrefillSide) -> None:
        """P computes; ends when the KV waits for a decode instance."""
        try:
            async with asyncio.timeout(self._timeouts.prefill):
                while self.progress.parked_at is None:
                    event = await side.news()
                    if event is not None:
                        self.progress.hear(event)
                        await side.check_event(event, bound=False)
                    elif side.outcome.done():
                        side.check_outcome()
                        self.progress.park()
        except TimeoutError:
            raise errors.timed_out(f"the prompt was not computed within {self._timeouts.prefill:g} seconds") from None

    def _bind(self, side: PrefillSide, endpoint: Endpoint) -> None:
        self.decode = DecodeSide(self._pairing.client, endpoint, self.request, body=side.body)
        self._pairing.fleet.started(self.request.rid, endpoint, len(self.request.input_ids))
        self.progress.enter(Stage.HANDSHAKE)
        self.progress.bound_at = time.monotonic()
        if self._timing:
            self.decode.relay.comment = self._comment
        self.decode.post()

    async def _until_first(self, side: PrefillSide) -> None:
        """D takes the KV; ends with the first byte of a stream, or with the whole answer."""
        relay = self._relay
        allowed = self._timeouts.first_token if self.streaming else self._timeouts.total
        if self.binding is Binding.EARLY:
            allowed += self._timeouts.prefill
        try:
            async with asyncio.timeout(allowed):
                await self._handshake(side, relay)
        except TimeoutError:
            instance = self._decode.endpoint.instance_id
            raise errors.timed_out(f"{instance} did not answer within {allowed:g} seconds") from None
        self._judge(relay)
        self.progress.first(relay.first_at)
        self.progress.enter(Stage.STREAMING)

    async def _handshake(self, side: PrefillSide, relay: Relay) -> None:
        while not relay.first.done():
            event = await side.news(relay.first)
            if relay.first.done():
                return
            try:
                if event is not None:
                    self.progress.hear(event)
                    await side.check_event(event, bound=True)
                elif side.outcome.done():
                    side.check_outcome()
            except ApiError:
                if side.lost and await self._first_came_anyway(relay):
                    return
                raise

    async def _first_came_anyway(self, relay: Relay) -> bool:
        # A transfer that was complete when P died goes on; how far it was is not known here.
        wait = None if self.progress.stage is Stage.TRANSFER else self._timeouts.prefill_lost
        await asyncio.wait({relay.first}, timeout=wait)
        return relay.first.done()

    def _judge(self, relay: Relay) -> None:
        """Tell a good begin of an answer from a failure; nothing has reached the client yet."""
        instance = self._decode.endpoint.instance_id
        if relay.error is not None and relay.first_at is None:
            raise errors.unavailable(f"{instance}: {relay.error}")
        if relay.status != 200:
            raise errors.from_engine(relay.status, relay.peek(), instance=instance)
        if relay.failed:
            raise errors.from_stream(relay.peek(), instance=instance)

    # --- the end

    def _broken(self) -> ApiError | None:
        relay = self._relay
        if relay.error is not None:
            return errors.bad_gateway(f"{self._decode.endpoint.instance_id}: {relay.error}")
        if relay.failed:
            self._status = 502  # the engine has told the client itself
        return None

    def _end(self, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        rid, pairing = self.request.rid, self._pairing
        decode_clean = self.decode is not None and self.decode.clean
        for side in self._sides():
            pairing.fleet.finished(rid, side.endpoint)
        if self.decode is not None and not decode_clean:
            self.decode.close()
            if self.decode.may_run:
                pairing.abort(self.decode.endpoint, rid)
        if self.prefill is not None and decode_clean:
            pairing.release(self.prefill, rid)
        elif self.prefill is not None:
            self.prefill.close()
            if self.prefill.may_run:
                pairing.abort(self.prefill.endpoint, rid)
        if self.decode is not None:
            self.decode.relay.detach()
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if error is not None:
            self._status = error.status if isinstance(error, ApiError) else _status_of(error)
        if self.decode is not None:
            self.progress.last_at = self.decode.relay.last_at
        summary = RequestSummary(
            rid=self.request.rid,
            path=self.request.path,
            status=self._status,
            stage=self.progress.stage.value,
            prefill_instance=self.prefill.endpoint.instance_id if self.prefill is not None else "",
            decode_instance=self.decode.endpoint.instance_id if self.decode is not None else "",
            times=self.times,
            usage=self.usage,
        )
        for listener in self._pairing.listeners:
            listener(summary)

    def _comment(self) -> bytes:
        relay = self._relay
        self.progress.first(relay.first_at)
        self.progress.last_at = relay.last_at
        return b": kllm " + orjson.dumps(self.times)

    def _sides(self) -> list[PrefillSide | DecodeSide]:
        return [side for side in (self.prefill, self.decode) if side is not None]

    @property
    def _decode(self) -> DecodeSide:
        if self.decode is None:
            raise RuntimeError("no decode instance was chosen yet")
        return self.decode

    @property
    def _relay(self) -> Relay:
        return self._decode.relay


def _status_of(error: BaseException) -> int:
    left = isinstance(error, (asyncio.CancelledError, GeneratorExit))
    return CLIENT_LEFT if left else 500
