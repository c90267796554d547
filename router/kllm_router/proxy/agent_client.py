"""Follows one instance's agent: its facts, load, requests and cache, over and over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_router.pauses import backoff

_CALL_SECONDS = 2.0
_NOT_STARTED_SECONDS = 0.25
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Each session's connection is its own: a shared one would keep the back-off of those that failed.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
)

_log = structlog.get_logger(__name__)


class AgentListener(Protocol):
    """Who is told. No call may wait or raise."""

    def on_facts(self, instance_id: str, facts: engine_pb2.Instance) -> None:
        """Facts of the present incarnation; a session or a new incarnation begins with them."""

    def on_not_started(self, instance_id: str, message: str) -> None:
        """The agent is there, and has no server yet."""

    def on_load(self, instance_id: str, report: engine_pb2.LoadReport) -> None:
        """A load report."""

    def on_request(self, instance_id: str, event: engine_pb2.RequestEvent) -> None:
        """A milestone of one request."""

    def on_cache(self, instance_id: str, update: engine_pb2.CacheUpdate) -> None:
        """A change of the cache."""

    def on_disconnected(self, instance_id: str, reason: str, *, refused: bool) -> None:
        """The session is over; `refused` when not even its first call was answered."""


class AgentClient:
    """Sessions with one agent, until `run` is cancelled.

    Args:
        address: host:port of the agent.
        token: fleet token.
        load_interval_seconds: how often the agent reports; three silent ones and half a second end the session.
        rng: for the back-off.
    """

    def __init__(
        self,
        instance_id: str,
        address: str,
        *,
        token: str,
        listener: AgentListener,
        rng: random.Random,
        load_interval_seconds: float = 0.1,
    ) -> None:
        self._id = instance_id
        self._address = address
        self._metadata = call_metadata(token)
        self._listener = listener
        self._rng = rng
        self._interval = load_interval_seconds
        self._silence_seconds = max(2.0, 3 * load_interval_seconds + 0.5)
        self._answered = False
        self._incarnation = 0
        self._cache_incarnation = 0
        self._cache_next = 0

    async def run(self) -> None:
        """Follow the agent for ever."""
        pauses = backoff(self._rng)
        while True:
            self._answered = False
            try:
                await self._session()
                reason = "the agent ended a stream"
            except (grpc.aio.AioRpcError, TimeoutError, OSError, _Gone) as error:
                reason = _said(error)
            self._listener.on_disconnected(self._id, reason, refused=not self._answered)
            if self._answered:
                pauses = backoff(self._rng)
            await asyncio.sleep(next(pauses))

    async def _session(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            stub: Any = engine_pb2_grpc.EngineAgentStub(channel)  # type: ignore[no-untyped-call]
            facts = await self._ask_facts(stub)
            # Whoever is told of the facts may send requests at once, whose milestones must not be missed.
            requests = await self._subscribe_requests(stub)
            self._tell_facts(facts)
            await _until_one_ends(self._follow_load(stub), self._follow_requests(requests), self._follow_cache(stub))

    async def _ask_facts(self, stub: Any) -> engine_pb2.Instance:
        while True:
            try:
                facts: engine_pb2.Instance = await stub.GetInstance(
                    engine_pb2.GetInstanceRequest(), metadata=self._metadata, timeout=_CALL_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                self._answered = True
                self._listener.on_not_started(self._id, error.details() or "")
                await asyncio.sleep(_NOT_STARTED_SECONDS)
                continue
            if facts.instance_id != self._id:
                # Addresses of pods are used again: its own has ended, and this instance has a record of its own.
                raise _Gone(f"another instance answers at its address: {facts.instance_id}")
            self._answered = True
            return facts

    def _tell_facts(self, facts: engine_pb2.Instance) -> None:
        self._incarnation = facts.incarnation
        self._listener.on_facts(self._id, facts)

    async def _subscribe_requests(self, stub: Any) -> Any:
        """A stream that tells all milestones from now on, which its initial metadata says."""
        call = stub.WatchRequests(engine_pb2.WatchRequestsRequest(), metadata=self._metadata)
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                await call.initial_metadata()
        except TimeoutError:
            raise _Gone(f"no word for {_CALL_SECONDS:g} seconds that its request stream has begun") from None
        return call

    async def _follow_load(self, stub: Any) -> None:
        request = engine_pb2.WatchLoadRequest(interval_milliseconds=round(self._interval * 1000), deltas=True)
        call = stub.WatchLoad(request, metadata=self._metadata)
        while True:
            try:
                report = await next_message(call, silence_seconds=self._silence_seconds)
            except TimeoutError:
                raise _Gone(f"no load report for {self._silence_seconds:g} seconds") from None
            if report is grpc.aio.EOF:
                raise _Gone("the agent ended its load stream")
            if report.incarnation != self._incarnation:
                self._tell_facts(await self._ask_facts(stub))
            self._listener.on_load(self._id, report)

    async def _follow_requests(self, call: Any) -> None:
        while (event := await call.read()) is not grpc.aio.EOF:
            self._listener.on_request(self._id, event)
        raise _Gone("the agent ended its request stream")

    async def _follow_cache(self, stub: Any) -> None:
        while True:
            request = engine_pb2.WatchCacheRequest(incarnation=self._cache_incarnation, from_sequence=self._cache_next)
            call = stub.WatchCache(request, metadata=self._metadata)
            while (update := await call.read()) is not grpc.aio.EOF:
                if not self._continues(update):
                    # Some of it is missing: begin again with a snapshot.
                    call.cancel()
                    self._cache_next = 0
                    break
                self._listener.on_cache(self._id, update)
                self._cache_incarnation = update.incarnation
                complete = update.WhichOneof("change") != "snapshot" or update.snapshot.last
                self._cache_next = update.sequence + 1 if complete else 0
            else:
                raise _Gone("the agent ended its cache stream")

    def _continues(self, update: engine_pb2.CacheUpdate) -> bool:
        """Whether nothing is missing before this update. A new server's log begins at 1 with an empty cache."""
        if update.WhichOneof("change") == "snapshot":
            return True
        if update.incarnation != self._cache_incarnation:
            return bool(update.sequence == 1)
        return bool(update.sequence == self._cache_next)


async def next_message(call: Any, *, silence_seconds: float) -> Any:
    """The next message of a stream, or its end.

    Time in which this process itself was held up counts for nothing: what came meanwhile is not read yet, and all
    agents would be taken for silent at once.

    Raises:
        TimeoutError: none came for so long.
    """
    clock = asyncio.get_running_loop().time
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            due = clock() + silence_seconds
            done, _ = await asyncio.wait({reading}, timeout=silence_seconds)
            if done:
                return reading.result()
            if clock() - due < silence_seconds / 2:
                raise TimeoutError
    finally:
        reading.cancel()


class _Gone(Exception):  # noqa: N818  it ends a session and is no error of the program
    """The agent no longer tells anything."""


async def _until_one_ends(*streams: Coroutine[Any, Any, None]) -> None:
    """Follow all of them; the first to fail ends the others, and its error is raised.

    A task group would do, but when it is cancelled while a stream fails it raises the failure and drops the
    cancellation, and `run` would go on for ever.
    """
    tasks = [asyncio.ensure_future(stream) for stream in streams]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _said(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
