"""The two engines of one request: what was posted to each, and what each has answered."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import orjson

from kllm_core.objectives import Role
from kllm_router.exceptions import ConnectError, UpstreamError
from kllm_router.interfaces import EventKind, WatchedEvent
from kllm_router.proxy import errors
from kllm_router.proxy.relay import Relay
from kllm_router.proxy.upstream import Collector, Response

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint, EngineRequest, RequestWatch
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
        self._client = client
        self._path = request.path
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

    def post(self) -> None:
        """Send the request."""
        self._call = self._client.call(self.endpoint, self._path, self.body, self._collector)

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
            ApiError: P refused the request, or is lost.
        """
        outcome = self.outcome.result()
        instance = self.endpoint.instance_id
        if isinstance(outcome, Response):
            if outcome.status != 200:
                raise errors.from_engine(outcome.status, outcome.body, instance=instance)
            return
        self.lost = True
        raise errors.unavailable(f"{instance}: {outcome}", code="prefill_lost")

    async def check_event(self, event: WatchedEvent, *, bound: bool) -> None:
        """Judge an event.

        Raises:
            ApiError: the event means that P cannot serve the request.
        """
        instance = self.endpoint.instance_id
        if event.kind is EventKind.INSTANCE_LOST:
            self.lost = True
            raise errors.unavailable(f"{instance} is gone: {event.message or event.reason}", code="prefill_lost")
        released_early = event.kind is EventKind.RELEASED and not (bound and event.reason in {TRANSFERRED, ""})
        if event.kind is EventKind.FAILED or released_early:
            # P's own answer says more, and follows at once.
            await asyncio.wait({self.outcome}, timeout=_OWN_ANSWER_SECONDS)
            if self.outcome.done():
                self.check_outcome()
            raise errors.unavailable(f"{instance} gave the request up: {event.message or event.reason or event.kind}")


class DecodeSide:
    """The request on its decode instance."""

    role = Role.DECODE.value

    def __init__(self, client: EngineClient, endpoint: Endpoint, request: EngineRequest, *, body: bytes) -> None:
        self.endpoint = endpoint
        self.relay = Relay(client.settings.pool, stream=request.stream, keep_usage=request.include_usage)
        self._client = client
        self._path = request.path
        self._body = _streamed(body, request) if request.stream else body

    @property
    def clean(self) -> bool:
        """Whether the whole answer has come and was good."""
        relay = self.relay
        ended = relay.call is not None and relay.call.receiver is None and relay.first.done()
        return (ended or relay.complete) and relay.error is None and relay.status == 200 and not relay.failed

    @property
    def may_run(self) -> bool:
        """Whether the engine may still hold the request."""
        relay = self.relay
        if relay.call is None or isinstance(relay.error, ConnectError):
            return False
        return relay.error is not None or not relay.first.done() or relay.streaming

    def post(self) -> None:
        """Send the request."""
        self.relay.call = self._client.call(self.endpoint, self._path, self._body, self.relay)

    def close(self) -> None:
        """Give up its connection."""
        if self.relay.call is not None:
            self.relay.call.close()


def _streamed(body: bytes, request: EngineRequest) -> bytes:
    """P's body with the fields of a stream; appending them is cheaper than writing all ids again."""
    if request.path == "/generate":
        return body[:-1] + b',"stream":true}'
    options = orjson.dumps({**(request.body.get("stream_options") or {}), "include_usage": True})
    return body[:-1] + b',"stream":true,"stream_options":' + options + b"}"
