"""An agent without an engine, as a process: serves the contract, and does what files beside it ask for.

In the folder of STUB_FOLDER: NAME.slow keeps it from getting ready, NAME.busy from getting empty, NAME.refuses from
switching its role, and NAME.breaks makes the switch fail.
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
from substrate.polling import polled

from kllm_core.authentication import metadata_is_valid, read_token_file
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc


def say(**event: object) -> None:
    """Print one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class StubAgent(engine_pb2_grpc.EngineAgentServicer):
    """Answers the operator."""

    def __init__(self, name: str, role: str, token: str) -> None:
        self.name, self.token = name, token
        self.role = engine_pb2.ROLE_PREFILL if role == "prefill" else engine_pb2.ROLE_DECODE
        self.state = engine_pb2.INSTANCE_STATE_SERVING
        self.incarnation = 1

    def asked(self, what: str) -> bool:
        """Whether a file asks for it."""
        return (Path(os.environ["STUB_FOLDER"]) / f"{self.name}.{what}").exists()

    async def GetInstance(self, _request: object, context: Any) -> engine_pb2.Instance:  # noqa: N802
        """Facts."""
        await self._check(context)
        return engine_pb2.Instance(
            instance_id=self.name, role=self.role, state=self.state, incarnation=self.incarnation, flippable=True,
            pacing="prefill=1+0n+0q",
        )  # fmt: skip

    async def WatchLoad(  # noqa: N802
        self, request: engine_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[engine_pb2.LoadReport]:
        """An idle engine, or one with a request."""
        await self._check(context)
        while True:
            yield engine_pb2.LoadReport(
                incarnation=self.incarnation, role=self.role, state=self.state, queued_tokens=0,
                running_requests=int(self.asked("busy")), queued_requests=0, queued_uncached_tokens=0, kv_used_tokens=0,
            )  # fmt: skip
            await asyncio.sleep(request.interval_milliseconds / 1000)

    async def Drain(  # noqa: N802
        self, request: engine_pb2.DrainRequest, context: Any
    ) -> AsyncIterator[engine_pb2.DrainProgress]:
        """Until no file keeps it busy, or until the deadline."""
        await self._check(context)
        self.state = engine_pb2.INSTANCE_STATE_DRAINING
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
        """Switch, refuse or break."""
        await self._check(context)
        if self.asked("refuses"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its engine does not switch roles")
        if self.asked("breaks"):
            await context.abort(grpc.StatusCode.INTERNAL, "the engine broke")
        await asyncio.sleep(0.05)
        self.role, self.state = request.role, engine_pb2.INSTANCE_STATE_SERVING
        self.incarnation += 1
        return engine_pb2.SwitchRoleResponse(switch_seconds=0.05, incarnation=self.incarnation)

    async def _check(self, context: Any) -> None:
        if not metadata_is_valid(context.invocation_metadata(), self.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")


async def serve(given: dict[str, str]) -> None:
    """Listen, get ready, and serve until SIGTERM."""
    name = given["instance-id"]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    stub = StubAgent(name, given["role"], read_token_file(Path(given["token-file"])))
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineAgentServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(event="listening", agent=f"127.0.0.1:{port}")
    await polled(lambda: ended.is_set() or not stub.asked("slow"))
    say(event="serving", seconds=0.1)
    await ended.wait()
    await server.stop(None)
