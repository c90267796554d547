"""The gRPC server: services, health, reflection, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_router.frontend.grpc_service import RouterService
from kllm_router.service_levels import ServiceLevels, ServiceLevelsService

_MAX_REQUEST_BYTES = 8 * 1024 * 1024
_HEALTH_SECONDS = 0.25
_MAX_CONCURRENT = 8192
_SERVICES = tuple(router_pb2.DESCRIPTOR.services_by_name[name].full_name for name in ("Router", "ServiceLevels"))


class GrpcServer:
    """Serves kllm.router.v1 and grpc.health.v1 on one port.

    Args:
        ready: whether requests could be served now; health tells it for Router and for the server as a whole.
        reflection_enabled: whether clients may ask for the contract.
        share_port: whether other processes listen on the same port.
    """

    def __init__(
        self,
        *,
        router: RouterService,
        levels: ServiceLevels,
        ready: Callable[[], bool],
        reflection_enabled: bool = True,
        share_port: bool = False,
    ) -> None:
        self._ready = ready
        self._health = health.HealthServicer()
        self._task: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.so_reuseport", int(share_port)),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
            maximum_concurrent_rpcs=_MAX_CONCURRENT,
        )
        router_pb2_grpc.add_RouterServicer_to_server(router, self._server)  # type: ignore[no-untyped-call]
        router_pb2_grpc.add_ServiceLevelsServicer_to_server(  # type: ignore[no-untyped-call]
            ServiceLevelsService(levels), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection_enabled:
            names = (*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> int:
        """Listen on host:port and return the port.

        Raises:
            RuntimeError: the address is in use or not of this machine.
        """
        port = self._server.add_insecure_port(address)
        if port == 0:
            raise RuntimeError(f"cannot listen on {address}")
        await self._tell(serving=self._ready())
        await self._server.start()
        self._task = asyncio.get_running_loop().create_task(self._follow_health())
        return int(port)

    async def announce_stop(self) -> None:
        """Report that nothing new should come, while it is still served."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing new, and let what runs end within the grace."""
        await self.announce_stop()
        await self._server.stop(grace_seconds)

    async def _follow_health(self) -> None:
        told = self._ready()
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            if (ready := self._ready()) != told:
                await self._tell(serving=ready)
                told = ready

    async def _tell(self, *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *_SERVICES):
            await self._health.set(service, state)
