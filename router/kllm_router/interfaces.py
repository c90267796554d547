"""What the router's parts promise each other: preparing a request, viewing the fleet, and errors for clients."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kllm_core.objectives import Binding, Role
from kllm_router.scheduling.quota import Spent
from kllm_router.scheduling.share import Share
from kllm_router.scheduling.silence import Awaited


class ApiError(Exception):
    """An error that a client is told, in OpenAI's form: {"error": {message, type, param, code}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002  OpenAI's field name
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class EngineRequest:
    """One validated request, as an engine will get it.

    Attributes:
        rid: 32 hex characters, unique; engines abort by it.
        path: of the engine's API: /v1/chat/completions, /v1/completions or /generate.
        body: for the engine, without stream, stream_options, rid and bootstrap fields.
        input_ids: the prompt's tokens; P and D get the same ids through `body`.
        stream: whether the client wants a stream.
        include_usage: whether the client wants the final usage chunk of a stream.
        max_new_tokens: None when the client set no limit.
        adapter: LoRA adapter; part of the cache key.
        salt: cache salt; part of the cache key.
        key: name of the client's API key; empty where none is needed.
        trace: header lines of the client's trace context for engines, each with its end; empty without any.
    """

    rid: str
    path: str
    body: dict[str, Any]
    input_ids: Sequence[int]
    stream: bool = False
    include_usage: bool = False
    max_new_tokens: int | None = None
    model: str = ""
    adapter: str = ""
    salt: str = ""
    key: str = ""
    trace: str = ""


class Preparer(Protocol):
    """Validates bodies of clients and tokenises them."""

    async def prepare(self, path: str, body: bytes) -> EngineRequest:
        """Build the engine's request; long work runs in a thread.

        Raises:
            ApiError: what the client did wrong.
        """
        ...

    def models(self) -> list[dict[str, Any]]:
        """OpenAI model objects that this router serves."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Where one engine is reached.

    Attributes:
        bootstrap_host: where a decode instance finds a prefill instance's KV; empty on decode instances.
        incarnation: connections to another incarnation are never reused.
    """

    instance_id: str
    role: Role
    http_host: str
    http_port: int
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    incarnation: int = 0


class EventKind(enum.StrEnum):
    """Milestones of one request on its prefill instance."""

    PREFILL_DONE = "prefill_done"
    REQUEUED = "requeued"
    RELEASED = "released"
    FAILED = "failed"
    INSTANCE_LOST = "instance_lost"
    """The instance died, changed its incarnation, or its agent's stream ended."""


@dataclass(frozen=True)
class WatchedEvent:
    """One milestone; times are those of the agent's RequestEvent."""

    kind: EventKind
    instance_id: str = ""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    parked_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""
    unheard_seconds: float = 0.0
    """Of a lost instance: how long before the event it gave its last sign of life."""
    message: str = ""


class RequestWatch(Protocol):
    """Events of one request, in order; those that came before `next` was called are kept (bounded)."""

    async def next(self) -> WatchedEvent:
        """Wait for the next event. Cancelling the call loses no event."""
        ...


class FleetView(Protocol):
    """The router's picture of the fleet. All calls but `RequestWatch.next` return at once."""

    @property
    def ready(self) -> bool:
        """Whether at least one prefill and one decode instance take requests."""
        ...

    @property
    def known(self) -> bool:
        """Whether discovery has told of the instances, and each has answered or had time to; it stays so."""
        ...

    def choose_prefill(
        self, request: EngineRequest, *, excluded: frozenset[str] = frozenset(), prefer: str = ""
    ) -> Endpoint:
        """Pick a prefill instance that is not in `excluded` (ids that failed this request).

        Args:
            request: what is to be computed.
            excluded: ids that are not taken.
            prefer: the id that is taken if it can serve: it has computed this prompt before.

        Raises:
            ApiError: 503 when none could serve, 429 with retry_after when all are overloaded.
        """
        ...

    def choose_decode(
        self, request: EngineRequest, prefill: Endpoint, *, excluded: frozenset[str] = frozenset()
    ) -> Endpoint:
        """Pick a decode instance for a request on `prefill`; errors as for `choose_prefill`."""
        ...

    async def changed(self) -> None:
        """Wait until an instance may have begun to take requests."""
        ...

    def judge(self, endpoint: Endpoint, *, passed: bool) -> None:
        """Learn that an instance has served a request, or has failed one."""
        ...

    def has_lost(self, endpoint: Endpoint, quiet_seconds: float, awaited: Awaited) -> bool:
        """Whether an instance that has said nothing of a request for so long no longer has it."""
        ...

    def binding(self, prefill: Endpoint) -> Binding:
        """When to choose the decode instance of a request on `prefill`: the wish, cut to what the instance can do."""
        ...

    def bind_after(self, request: EngineRequest) -> float | None:
        """Seconds from sending a prompt until its decode instance is asked just in time; None: when it is computed."""
        ...

    def watch(self, rid: str, endpoint: Endpoint) -> AbstractContextManager[RequestWatch]:
        """Subscribe to events of `rid` from an instance; enter it before the request is posted."""
        ...

    def started(self, rid: str, endpoint: Endpoint, tokens: int) -> None:
        """Count `tokens` of `rid` as in flight on `endpoint`, until `finished`."""
        ...

    def finished(self, rid: str, endpoint: Endpoint) -> None:
        """Take back `started`; unknown pairs are ignored."""
        ...

    def status(self) -> dict[str, Any]:
        """Instances with states and loads, for people: {"instances": [{id, role, state, load, ...}]}."""
        ...


class SharedLoad(Protocol):
    """What the other routers of the service do. All calls return at once."""

    def of(self, instance_id: str, now: float) -> Share:
        """What they have on an instance at a moment of the monotonic clock."""
        ...

    def spent(self, key: str, now: float) -> Spent:
        """What they let a key take, at the same moment."""
        ...

    def status(self) -> dict[str, Any] | None:
        """How well they are heard, for people: {"up", "address", "problem", "routers"}; None where there are none."""
        ...


@dataclass(frozen=True)
class StageTimes:
    """Seconds at the router's edge; None is unknown or did not happen. See kllm.router.v1.StageTimes."""

    queue: float | None = None
    prefill: float | None = None
    bind: float | None = None
    transfer: float | None = None
    first_token: float | None = None
    per_output_token: float | None = None

    @property
    def prefilled(self) -> float | None:
        """Queue and prefill together."""
        return None if self.queue is None or self.prefill is None else self.queue + self.prefill

    @property
    def handover(self) -> float | None:
        """Bind and transfer together."""
        return None if self.bind is None or self.transfer is None else self.bind + self.transfer


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; None is unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class RequestSummary:
    """How a request ended, for metrics and service levels.

    Attributes:
        status: HTTP status, 499 when the client left.
        stage: the stage in which it ended.
        attempts: pairs of instances that it was given to, those of continuations included.
        continuations: how often its stream went on on another instance.
    """

    rid: str
    path: str
    status: int
    stage: str
    prefill_instance: str = ""
    decode_instance: str = ""
    attempts: int = 1
    continuations: int = 0
    times: StageTimes = field(default_factory=StageTimes)
    usage: Usage = field(default_factory=Usage)
