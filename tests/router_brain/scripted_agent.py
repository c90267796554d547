"""An agent as a real gRPC server whose streams say what a test puts into them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from kllm_core.authentication import metadata_is_valid
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role

TOKEN = "a-token-of-some-length"  # not a secret: only these tests use it
_END = object()


class ScriptedAgent(engine_pb2_grpc.EngineAgentServicer):
    """Serves one instance.

    Attributes:
        facts: what GetInstance says; None makes it FAILED_PRECONDITION.
        cache_requests: what WatchCache was asked for.
        age: seconds since the engine's last sign of life, as reports tell it.
        asked, subscribed: how many subscriptions to requests were asked for, and stand.
        subscribable: while it is not set, nobody's subscription to requests begins.
    """

    def __init__(self, instance_id: str, role: Role = Role.PREFILL, *, token: str = TOKEN, **facts: Any) -> None:
        prefill = role is Role.PREFILL
        values: dict[str, Any] = {
            "instance_id": instance_id, "service": "chat", "incarnation": 1, "http_address": "127.0.0.1:30000",
            "role": engine_pb2.ROLE_PREFILL if prefill else engine_pb2.ROLE_DECODE, "page_size": 4,
            "state": engine_pb2.INSTANCE_STATE_SERVING, "bootstrap_host": "127.0.0.1" if prefill else "",
            "bootstrap_port": 31000 if prefill else 0, "context_tokens": 2048, "kv_total_tokens": 10_000,
            "bindings": [engine_pb2.BINDING_LATE, engine_pb2.BINDING_EARLY],
        }  # fmt: skip
        self.id = instance_id
        self.token = token
        self.role = role
        self.facts: engine_pb2.Instance | None = engine_pb2.Instance(**(values | facts))
        self.silent = False
        self.age = 0.0
        self.cache_requests: list[engine_pb2.WatchCacheRequest] = []
        self.asked = 0
        self.subscribed = 0
        self.subscribable = asyncio.Event()
        self.subscribable.set()
        self._events: list[asyncio.Queue[Any]] = []
        self._cache: list[asyncio.Queue[Any]] = []
        self._loads: dict[str, Any] = {"running_requests": 0, "queued_uncached_tokens": 0, "kv_used_tokens": 0}
        self._server: grpc.aio.Server | None = None
        self.host = "127.0.0.1"
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> ScriptedAgent:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        engine_pb2_grpc.add_EngineAgentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def end_streams(self) -> None:
        for queue in [*self._events, *self._cache]:
            queue.put_nowait(_END)

    def load(self, **values: Any) -> None:
        self._loads |= values

    def tell(self, rid: str, kind: str, **values: Any) -> None:
        number = getattr(engine_pb2, f"REQUEST_EVENT_KIND_{kind}")
        incarnation = values.pop("incarnation", self.incarnation)
        event = engine_pb2.RequestEvent(request_id=rid, kind=number, incarnation=incarnation, **values)
        for queue in self._events:
            queue.put_nowait(event)

    def change_cache(self, update: engine_pb2.CacheUpdate) -> None:
        update.incarnation = update.incarnation or self.incarnation
        for queue in self._cache:
            queue.put_nowait(update)

    @property
    def incarnation(self) -> int:
        return self.facts.incarnation if self.facts is not None else 0

    # --- the contract

    async def GetInstance(self, request, context):  # noqa: N802
        await self._check(context)
        if self.facts is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no server yet")
        return self.facts

    async def WatchLoad(self, request, context):  # noqa: N802
        await self._check(context)
        sequence = 0
        while True:
            if not self.silent and self.facts is not None:
                sequence += 1
                yield engine_pb2.LoadReport(
                    sequence=sequence,
                    incarnation=self.incarnation,
                    state=self.facts.state,
                    age_seconds=self.age,
                    **self._loads,
                )
            await asyncio.sleep(0.02)

    async def WatchRequests(self, request, context):  # noqa: N802
        await self._check(context)
        self.asked += 1
        await self.subscribable.wait()
        self.subscribed += 1
        async for event in self._drain(self._events, context):
            yield event

    async def WatchCache(self, request, context):  # noqa: N802
        await self._check(context)
        self.cache_requests.append(request)
        async for update in self._drain(self._cache, context):
            yield update

    async def _drain(self, queues: list[asyncio.Queue[Any]], context: grpc.aio.ServicerContext):
        queue: asyncio.Queue[Any] = asyncio.Queue()
        queues.append(queue)
        try:
            await context.send_initial_metadata(())
            while (item := await queue.get()) is not _END:
                yield item
        finally:
            queues.remove(queue)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not metadata_is_valid(context.invocation_metadata() or (), self.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the fleet token is missing")
