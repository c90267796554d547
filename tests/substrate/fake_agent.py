"""The two calls of an agent that a substrate makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Self

import grpc.aio

from kllm_core.authentication import metadata_is_valid
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc


class FakeAgent(engine_pb2_grpc.EngineAgentServicer):
    """Drains at once and switches its role, unless told to refuse."""

    def __init__(self) -> None:
        self.token = "x" * 32
        self.refuses = False
        self.address = ""
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Self:
        engine_pb2_grpc.add_EngineAgentServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def Drain(  # noqa: N802
        self, request: engine_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.DrainProgress]:
        """One request is left, then none."""
        await self._check(context)
        yield engine_pb2.DrainProgress(remaining_requests=1)
        yield engine_pb2.DrainProgress(drained=True)

    async def SwitchRole(  # noqa: N802
        self, request: engine_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.SwitchRoleResponse:
        """Switch, or refuse."""
        await self._check(context)
        if self.refuses:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not empty")
        return engine_pb2.SwitchRoleResponse(switch_seconds=0.1, incarnation=2)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        if not metadata_is_valid(context.invocation_metadata(), self.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
