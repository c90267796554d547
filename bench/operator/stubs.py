"""All agents and routers in one process: each loopback address is one of them, and they all say the same.

python bench/operator/stubs.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc

AGENT_PORT, ROUTER_PORT = 7300, 8001


_REPORT = engine_pb2.LoadReport(
    sequence=1, incarnation=1, age_seconds=0.1, state=engine_pb2.INSTANCE_STATE_SERVING, running_requests=0,
    queued_requests=0, queued_tokens=0, queued_uncached_tokens=0, kv_used_tokens=0, kv_evictable_tokens=0,
    kv_total_tokens=65536, kv_high_water_tokens=60000, parked_requests=0, parked_tokens=0, parked_limit_tokens=8192,
    transferring_requests=0, retracted_requests=0, max_running_requests=64, total_prefill_tokens=0,
    total_decode_tokens=0, total_prefill_busy_seconds=0.0,
).SerializeToString()  # fmt: skip
"""What an idle engine tells. Its bytes are made once, so that thousands of agents fit into one process."""


_INSTANCE = engine_pb2.Instance(
    state=engine_pb2.INSTANCE_STATE_SERVING, incarnation=1, flippable=True, page_size=16, context_tokens=4096,
    start_phases=[engine_pb2.StartPhase(name="engine", seconds=0.5)],
)  # fmt: skip


async def get_instance(_request: object, _context: object) -> engine_pb2.Instance:
    """The facts of each."""
    return _INSTANCE


async def watch_load(request: engine_pb2.WatchLoadRequest, _context: object) -> AsyncIterator[bytes]:
    """The same report each interval."""
    while True:
        yield _REPORT
        await asyncio.sleep((request.interval_milliseconds or 1000) / 1000)


async def drain(_request: object, _context: object) -> AsyncIterator[engine_pb2.DrainProgress]:
    """There is nothing to finish."""
    yield engine_pb2.DrainProgress(drained=True)


_AGENT = grpc.method_handlers_generic_handler(
    "kllm.engine.v1.EngineAgent",
    {
        "GetInstance": grpc.unary_unary_rpc_method_handler(
            get_instance, engine_pb2.GetInstanceRequest.FromString, engine_pb2.Instance.SerializeToString
        ),
        "WatchLoad": grpc.unary_stream_rpc_method_handler(watch_load, engine_pb2.WatchLoadRequest.FromString),
        "Drain": grpc.unary_stream_rpc_method_handler(
            drain, engine_pb2.DrainRequest.FromString, engine_pb2.DrainProgress.SerializeToString
        ),
    },
)


class Levels(router_pb2_grpc.ServiceLevelsServicer):
    """Routers without clients."""

    async def WatchServiceLevels(  # noqa: N802
        self, request: router_pb2.WatchServiceLevelsRequest, _context: object
    ) -> AsyncIterator[router_pb2.ServiceLevelReport]:
        """Nothing arrives."""
        seconds = request.interval_milliseconds / 1000
        while True:
            yield router_pb2.ServiceLevelReport(router_id="stub", interval_seconds=seconds)
            await asyncio.sleep(seconds)


async def serve() -> None:
    """Serve until ended."""
    servers = []
    for port in (AGENT_PORT, ROUTER_PORT):
        server = grpc.aio.server()
        healths = health.aio.HealthServicer()
        await healths.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(healths, server)
        server.add_generic_rpc_handlers((_AGENT,))
        router_pb2_grpc.add_ServiceLevelsServicer_to_server(Levels(), server)
        server.add_insecure_port(f"0.0.0.0:{port}")
        await server.start()
        servers.append(server)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve())
