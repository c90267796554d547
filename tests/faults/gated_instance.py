"""One gated instance: its agent, its engine, and the proxies in front of both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc.aio
from faults.proxies import AgentProxy, HttpProxy

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role
from kllm_engine.agent.processes import inspect, members

_START_SECONDS = 120.0


class GatedInstance:
    """One instance: its agent, its engine, and the proxies in front of both.

    Attributes:
        agent: the agent's process.
    """

    def __init__(self, instance_id: str, role: Role, agent: asyncio.subprocess.Process, log: Path) -> None:
        self.id = instance_id
        self.role = role
        self.agent = agent
        self.log = log
        self.http: HttpProxy | None = None
        self.proxy: AgentProxy | None = None
        self._engine: set[int] = set()

    async def serve(self, token: str, zygote_log: Path) -> None:
        """Wait until the engine serves, and put the proxies in front of it."""
        agent = (await self._event("listening"))["agent"]
        await self._event("serving")
        facts = await _facts(agent, token)
        host, _, port = facts.http_address.rpartition(":")
        self.http = HttpProxy(host, int(port))
        await self.http.start()
        self.proxy = AgentProxy(agent, http=self.http)
        await self.proxy.start()
        self._engine = {process.pid for process in members(server_pid(zygote_log, self.id))}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the engine."""
        for pid in self._engine:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def cut(self) -> None:
        """Reset all connections between the router and the engine."""
        assert self.http is not None
        self.http.reset()

    def silence(self) -> None:
        """Let nothing pass between the router and this instance, without an end of any connection."""
        assert self.http is not None
        assert self.proxy is not None
        self.http.passing.clear()
        self.proxy.passing.clear()

    def restore(self) -> None:
        """Let everything pass again; connections that were silent are gone."""
        assert self.http is not None
        assert self.proxy is not None
        if not self.http.passing.is_set():
            self.http.reset()
        self.http.passing.set()
        self.proxy.passing.set()
        self.proxy.telling.set()
        self.proxy.parked.clear()

    @property
    def is_well(self) -> bool:
        """Whether the agent and all processes of the engine run."""
        parts = [inspect(pid) for pid in self._engine]
        return self.agent.returncode is None and all(part is not None and part.state not in "ZXT" for part in parts)

    async def close(self) -> None:
        """End agent, engine and proxies."""
        if self.agent.returncode is None:
            self.agent.kill()
        await self.agent.wait()
        if self.proxy is not None:
            await self.proxy.stop()
        if self.http is not None:
            await self.http.stop()

    async def _event(self, name: str) -> dict[str, Any]:
        assert self.agent.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            while line := await self.agent.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        raise AssertionError(f"{self.id} ended before {name!r}:\n{self.log.read_text()[-3000:]}")


async def _facts(agent: str, token: str) -> Any:
    async with grpc.aio.insecure_channel(agent) as channel:
        stub = engine_pb2_grpc.EngineAgentStub(channel)
        return await stub.GetInstance(engine_pb2.GetInstanceRequest(), metadata=call_metadata(token))


def server_pid(zygote_log: Path, instance_id: str) -> int:
    """The zygote's log says which process it forked for whom; it leads the engine's process group."""
    for line in reversed(zygote_log.read_text().splitlines()):
        told = json.loads(line) if line.startswith("{") else {}
        if told.get("server") == instance_id and told.get("event") == "server started":
            return int(told["pid"])
    raise AssertionError(f"the zygote says nothing of {instance_id}")
