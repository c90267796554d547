"""An agent without an engine, as a process: serves the contract, and does what files beside it ask for.

In the folder of STUB_FOLDER: NAME.slow keeps it from getting ready, NAME.busy from getting empty, NAME.refuses from
switching or taking a role, NAME.breaks makes the switch fail, and NAME.stuck keeps it at the switch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from substrate.polling import polled

from kllm_core.authentication import metadata_is_valid, read_token_file
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc

_HEALTH = health_pb2.HealthCheckResponse
_ROLES = {"prefill": engine_pb2.ROLE_PREFILL, "decode": engine_pb2.ROLE_DECODE}


def say(**event: object) -> None:
    """Print one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class StubAgent(engine_pb2_grpc.EngineAgentServicer):
    """Answers the operator. Without a role it is a slot."""

    def __init__(self, name: str, role: str, token: str) -> None:
        self.name, self.token = name, token
        self.role = _ROLES.get(role, engine_pb2.ROLE_UNSPECIFIED)
        self.state = engine_pb2.INSTANCE_STATE_STARTING
        self.incarnation = 1
        self.assumed = asyncio.Event()
        self.switching: asyncio.Task[None] | None = None
        self.changed = asyncio.Condition()
        self.health = health.aio.HealthServicer()

    def asked(self, what: str) -> bool:
        """Whether a file asks for it."""
        return (Path(os.environ["STUB_FOLDER"]) / f"{self.name}.{what}").exists()

    async def move(self, state: engine_pb2.InstanceState.ValueType) -> None:
        """Take a state, and tell of it."""
        async with self.changed:
            self.state = state
            self.changed.notify_all()
        serves = state == engine_pb2.INSTANCE_STATE_SERVING
        await self.health.set("readiness", _HEALTH.SERVING if serves else _HEALTH.NOT_SERVING)

    async def get_ready(self) -> None:
        """Be a slot until it has a role, and start then."""
        if self.role == engine_pb2.ROLE_UNSPECIFIED:
            await polled(lambda: not self.asked("slow"))
            await self.move(engine_pb2.INSTANCE_STATE_SLOT)
            say(event="slot")
            await self.assumed.wait()
            await self.move(engine_pb2.INSTANCE_STATE_STARTING)
        await polled(lambda: not self.asked("slow"))
        await self.move(engine_pb2.INSTANCE_STATE_SERVING)
        say(event="serving", seconds=0.1)

    async def GetInstance(self, _request: object, context: Any) -> engine_pb2.Instance:  # noqa: N802
        """Facts."""
        await self._check(context)
        return engine_pb2.Instance(
            instance_id=self.name, role=self.role, state=self.state, incarnation=self.incarnation, flippable=True,
            pacing="prefill=1+0n+0q", start_phases=[engine_pb2.StartPhase(name="engine", seconds=0.1)],
        )  # fmt: skip

    async def WatchLoad(  # noqa: N802
        self, request: engine_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[engine_pb2.LoadReport]:
        """An idle engine, or one with a request; at once when its state changes."""
        await self._check(context)
        while True:
            told = self.state
            yield engine_pb2.LoadReport(
                incarnation=self.incarnation, role=self.role, state=told, queued_tokens=0,
                running_requests=int(self.asked("busy")), queued_requests=0, queued_uncached_tokens=0, kv_used_tokens=0,
            )  # fmt: skip
            try:
                async with asyncio.timeout(request.interval_milliseconds / 1000), self.changed:
                    await self.changed.wait_for(lambda told=told: self.state != told)
            except TimeoutError:
                continue

    async def Drain(  # noqa: N802
        self, request: engine_pb2.DrainRequest, context: Any
    ) -> AsyncIterator[engine_pb2.DrainProgress]:
        """Until no file keeps it busy, or until the deadline."""
        await self._check(context)
        await self.move(engine_pb2.INSTANCE_STATE_DRAINING)
        try:
            async with asyncio.timeout(request.deadline_milliseconds / 1000):
                await polled(lambda: not self.asked("busy"))
        except TimeoutError:
            yield engine_pb2.DrainProgress(remaining_requests=1, deadline_passed=True)
            return
        yield engine_pb2.DrainProgress(drained=True)

    async def SwitchRole(  # noqa: N802
        self, request: engine_pb2.SwitchRoleRequest, context: Any
    ) -> engine_pb2.SwitchRoleResponse:
        """Switch, refuse or break. What was begun goes on without whoever asked for it."""
        await self._check(context)
        if self.asked("refuses"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its engine does not switch roles")
        if self.asked("breaks"):
            await context.abort(grpc.StatusCode.INTERNAL, "the engine broke")
        if self.role == request.role and self.state == engine_pb2.INSTANCE_STATE_SERVING:
            return engine_pb2.SwitchRoleResponse(switch_seconds=0.0, incarnation=self.incarnation)
        if self.switching is None or self.switching.done():
            self.switching = asyncio.create_task(self._switch(request.role))
        await asyncio.shield(self.switching)
        return engine_pb2.SwitchRoleResponse(switch_seconds=0.05, incarnation=self.incarnation)

    async def Assume(  # noqa: N802
        self, request: engine_pb2.AssumeRequest, context: Any
    ) -> engine_pb2.AssumeResponse:
        """Take a role, or refuse."""
        await self._check(context)
        if self.asked("refuses") or self.role not in {engine_pb2.ROLE_UNSPECIFIED, request.role}:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it does not take this role")
        self.role = request.role
        self.assumed.set()
        return engine_pb2.AssumeResponse(state=engine_pb2.INSTANCE_STATE_STARTING)

    async def _switch(self, role: engine_pb2.Role.ValueType) -> None:
        await self.move(engine_pb2.INSTANCE_STATE_STARTING)
        await asyncio.sleep(0.05)
        await polled(lambda: not self.asked("stuck"))
        self.role = role
        self.incarnation += 1
        await self.move(engine_pb2.INSTANCE_STATE_SERVING)

    async def _check(self, context: Any) -> None:
        if not metadata_is_valid(context.invocation_metadata(), self.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")


async def serve(given: dict[str, str]) -> None:
    """Listen, get ready, and serve until SIGTERM."""
    name = given["instance-id"]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    stub = StubAgent(name, given.get("role", ""), read_token_file(Path(given["token-file"])))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    engine_pb2_grpc.add_EngineAgentServicer_to_server(stub, server)
    health_pb2_grpc.add_HealthServicer_to_server(stub.health, server)
    await stub.health.set("liveness", _HEALTH.SERVING)
    host = given["listen"].rpartition(":")[0]
    port = server.add_insecure_port(given["listen"])
    await server.start()
    say(event="listening", agent=f"{host}:{port}")
    ready = asyncio.create_task(stub.get_ready())
    await ended.wait()
    ready.cancel()
    await server.stop(None)
