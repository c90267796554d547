"""The two engines of one attempt: what was posted to each, and what each has answered."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import orjson

from kllm_core.objectives import Role
from kllm_router.exceptions import ConnectError, IdleClosedError, InstanceGoneError, UpstreamError
from kllm_router.interfaces import EventKind, WatchedEvent
from kllm_router.proxy import errors
from kllm_router.proxy.relay import Relay
from kllm_router.proxy.setback import Cause, Setback, cause_of, is_between
from kllm_router.proxy.upstream import Collector, Response
from kllm_router.scheduling.silence import Awaited

if TYPE_CHECKING:
    from kllm_router.interfaces import ApiError, Endpoint, EngineRequest, FleetView, RequestWatch
    from kllm_router.proxy.upstream import EngineCall, EngineClient

TRANSFERRED = "Transferred"
_ROOM_BITS = 62
_OWN_ANSWER_SECONDS = 1.0


def new_room() -> int:
    """A number by which P and D find each other's request."""
    return secrets.randbits(_ROOM_BITS)


class PrefillSide:
    """The request on its prefill instance.

    Attributes:
        body: what P was or will be posted; D gets the same.
        outcome: P's own answer, which comes after the transfer unless something fails.
        lost: P is gone, as opposed to having refused the request.
        parked: P has told that the KV is complete, or it may be handed over without a word of that.
    """

    role = Role.PREFILL.value

    def __init__(
        self, client: EngineClient, endpoint: Endpoint, request: EngineRequest, *, room: int, watch: RequestWatch
    ) -> None:
        self.endpoint = endpoint
        # stream_options without stream is refused; only D streams.
        fields = {name: value for name, value in request.body.items() if name != "stream_options"}
        self.body = orjson.dumps(
            {
                **fields,
                "rid": request.rid,
                "bootstrap_host": endpoint.bootstrap_host,
                "bootstrap_port": endpoint.bootstrap_port,
                "bootstrap_room": room,
            }
        )
        self.lost = False
        self.parked = False
        self._client = client
        self._path = request.path
        self._trace = request.trace
        self._watch = watch
        self._call: EngineCall | None = None
        self._collector = Collector(client.settings.pool.response_bytes)
        self.outcome = self._collector.outcome
        self._answer_seen = False
        self._next_event: asyncio.Future[WatchedEvent] | None = None

    @property
    def may_run(self) -> bool:
        """Whether the engine may still hold the request."""
        if self._call is None:
            return False
        if not self.outcome.done():
            return True
        outcome = self.outcome.result()
        return isinstance(outcome, UpstreamError) and not isinstance(outcome, ConnectError)

    def post(self, fleet: FleetView) -> None:
        """Send the request."""

        def suspect(quiet_seconds: float) -> bool:
            return fleet.has_lost(self.endpoint, quiet_seconds, Awaited.HANDOVER if self.parked else Awaited.KV)

        self._call = self._client.call(
            self.endpoint, self._path, self.body, receiver=self._collector, suspect=suspect, trace=self._trace
        )

    def close(self) -> None:
        """Give up its connection."""
        if self._call is not None:
            self._call.close()

    async def news(self, other: asyncio.Future[None] | None = None) -> WatchedEvent | None:
        """Wait for an event, P's own answer (once), or `other`; only an event is returned."""
        if self._next_event is None:
            self._next_event = asyncio.ensure_future(self._watch.next())
        waiting: set[asyncio.Future[Any]] = {self._next_event}
        if not self._answer_seen:
            waiting.add(self.outcome)
        if other is not None:
            waiting.add(other)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._next_event.done():
            event, self._next_event = self._next_event.result(), None
            return event
        self._answer_seen = self.outcome.done()
        return None

    def stop_watching(self) -> None:
        """Wait for no further event."""
        if self._next_event is not None:
            self._next_event.cancel()
            self._next_event = None

    def check_outcome(self) -> None:
        """Look at P's own answer.

        Raises:
            ApiError: P refused the request.
            Setback: P failed or is lost.
        """
        outcome = self.outcome.result()
        instance = self.endpoint.instance_id
        if isinstance(outcome, Response):
            if outcome.status != 200:
                error = errors.from_engine(outcome.status, outcome.body, instance=instance)
                raise _judged(error, self.endpoint)
            return
        self.lost = True
        error = errors.unavailable(f"{instance}: {outcome}", code="prefill_lost")
        certain = not isinstance(outcome, IdleClosedError)
        raise Setback(error, self.endpoint, cause_of(outcome), certain=certain, unheard_seconds=outcome.unheard_seconds)

    async def check_event(self, event: WatchedEvent, *, bound: bool) -> None:
        """Judge an event.

        Raises:
            ApiError: P refused the request.
            Setback: the event means that P cannot serve the request.
        """
        instance = self.endpoint.instance_id
        self.parked = self.parked or event.kind is not EventKind.REQUEUED
        if event.kind is EventKind.INSTANCE_LOST:
            self.lost = True
            error = errors.unavailable(f"{instance} is gone: {event.message or event.reason}", code="prefill_lost")
            raise Setback(error, self.endpoint, Cause.GONE, unheard_seconds=event.unheard_seconds)
        released_early = event.kind is EventKind.RELEASED and not (bound and event.reason in {TRANSFERRED, ""})
        if event.kind is EventKind.FAILED or released_early:
            # P's own answer says more, and follows at once.
            await asyncio.wait({self.outcome}, timeout=_OWN_ANSWER_SECONDS)
            if self.outcome.done():
                self.check_outcome()
            said = event.message or event.reason or event.kind
            error = errors.unavailable(f"{instance} gave the request up: {said}")
            raise Setback(error, self.endpoint, Cause.ENGINE, between=bound or is_between(said))


class DecodeSide:
    """The request on a decode instance.

    Args:
        body: what P was posted.
        relay: takes the answer.
    """

    role = Role.DECODE.value

    def __init__(
        self, client: EngineClient, endpoint: Endpoint, request: EngineRequest, *, body: bytes, relay: Relay
    ) -> None:
        self.endpoint = endpoint
        self.relay = relay
        self._client = client
        self._path = request.path
        self._trace = request.trace
        self._body = _streamed(body, request, token_ids=relay.transcript is not None) if request.stream else body
        self._awaited = Awaited.TOKENS if request.stream and not _withholds(request) else Awaited.ANSWER
        self._watching: asyncio.Task[None] | None = None

    @property
    def clean(self) -> bool:
        """Whether the whole answer has come and was good."""
        return self.relay.clean

    @property
    def may_run(self) -> bool:
        """Whether the engine may still hold the request."""
        relay = self.relay
        if relay.call is None or isinstance(relay.error, ConnectError):
            return False
        return relay.error is not None or not relay.first.done() or relay.streaming

    def post(self, fleet: FleetView, rid: str) -> None:
        """Send the request; from now on it is lost when the instance is."""
        endpoint, awaited = self.endpoint, self._awaited

        def suspect(quiet_seconds: float) -> bool:
            return fleet.has_lost(endpoint, quiet_seconds, awaited)

        self._watching = asyncio.get_running_loop().create_task(self._watch(fleet, rid))
        self.relay.call = self._client.call(
            endpoint, self._path, self._body, receiver=self.relay, suspect=suspect, trace=self._trace
        )

    def stop_watching(self) -> None:
        """Hear nothing more of the instance."""
        watching, self._watching = self._watching, None  # its last frame holds this
        if watching is not None:
            watching.cancel()

    def close(self) -> None:
        """Give up its connection."""
        if self.relay.call is not None:
            self.relay.call.close()

    def check(self) -> None:
        """Tell a good begin of an answer from a failure; nothing has reached the client yet.

        Raises:
            ApiError: D refused the request.
            Setback: D failed or is lost.
        """
        relay, instance = self.relay, self.endpoint.instance_id
        if relay.error is not None and relay.first_at is None:
            raise self._lost(relay.error)
        if relay.status != 200:
            raise _judged(errors.from_engine(relay.status, relay.peek(), instance=instance), self.endpoint)
        if relay.failure and not relay.peek():
            raise _judged(errors.from_stream(relay.failure, instance=instance), self.endpoint)

    def fault(self) -> Setback | ApiError | None:
        """Why an answer that has begun well is not complete; None when it is."""
        relay = self.relay
        if relay.clean:
            return None
        if relay.failure:
            return _judged(errors.from_stream(relay.failure, instance=self.endpoint.instance_id), self.endpoint)
        if relay.error is not None:
            return self._lost(relay.error)
        error = errors.unavailable(f"{self.endpoint.instance_id}: the stream ended before its end was told")
        return Setback(error, self.endpoint, Cause.RESET)

    def late(self, seconds: float) -> Setback:
        """What it means that D has not answered in time."""
        error = errors.timed_out(f"{self.endpoint.instance_id} did not answer within {seconds:g} seconds")
        return Setback(error, self.endpoint, Cause.TIMEOUT)

    def _lost(self, error: UpstreamError) -> Setback:
        told = errors.unavailable(f"{self.endpoint.instance_id}: {error}")
        return Setback(
            told,
            self.endpoint,
            cause_of(error),
            certain=not isinstance(error, IdleClosedError),
            room_free=isinstance(error, ConnectError),
            unheard_seconds=error.unheard_seconds,
        )

    async def _watch(self, fleet: FleetView, rid: str) -> None:
        with fleet.watch(rid, self.endpoint) as watch:
            while (event := await watch.next()).kind is not EventKind.INSTANCE_LOST:
                pass
        if not self.relay.done.done():
            if self.relay.call is not None:
                self.relay.call.close()
            told = f"the instance is gone: {event.message or event.reason}"
            self.relay.on_lost(InstanceGoneError(told, unheard_seconds=event.unheard_seconds))


def _judged(error: ApiError, endpoint: Endpoint) -> Setback | ApiError:
    """An engine's error answer: what another instance would say too is for the client."""
    if error.status < 500:
        return error
    return Setback(error, endpoint, Cause.ENGINE, between=is_between(error.message))


def _withholds(request: EngineRequest) -> bool:
    """Whether the engine may hold back what it has computed, to look at it as a whole: silence says nothing then."""
    body = request.body
    return bool(body.get("tools")) or body.get("stream_reasoning") is False


def _streamed(body: bytes, request: EngineRequest, *, token_ids: bool) -> bytes:
    """P's body with the fields of a stream; appending them is cheaper than writing all ids again."""
    told = b',"kllm_token_ids":true' if token_ids else b""
    if request.path == "/generate":
        return body[:-1] + told + b',"stream":true}'
    options = orjson.dumps({**(request.body.get("stream_options") or {}), "include_usage": True})
    return body[:-1] + told + b',"stream":true,"stream_options":' + options + b"}"
