"""Real engines with their agents and no router: a test is the router, and addresses each instance itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2

from kllm_core.authentication import bearer, call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role
from kllm_core.wire import ROLES

TOKEN = "a-token-for-tests-only"
METADATA = call_metadata(TOKEN)
_PROGRAM = (sys.executable, "-P", "-m", "kllm_engine.main")
_START_SECONDS = 120.0


class Agent:
    """One instance."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, run: Path, instance_id: str) -> None:
        self.process = process
        self.id = instance_id
        self.log = run / "logs" / f"{instance_id}.engine.log"
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = engine_pb2_grpc.EngineAgentStub(self._channel)

    async def instance(self) -> engine_pb2.Instance:
        """Its facts now."""
        return await self.stub.GetInstance(engine_pb2.GetInstanceRequest(), metadata=METADATA)

    async def serving(self) -> None:
        """Wait for its announcement."""
        event = await self.event()
        assert event["event"] == "serving", event

    async def event(self) -> dict[str, Any]:
        """Its next announcement."""
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), _START_SECONDS))

    def watch(self, milliseconds: int = 50) -> Any:
        """Its load reports."""
        return self.stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=milliseconds), metadata=METADATA)

    async def drain(self, *, seconds: float = 30.0) -> engine_pb2.DrainProgress:
        """Drain it; what was told last."""
        request = engine_pb2.DrainRequest(deadline_milliseconds=int(seconds * 1000))
        return [progress async for progress in self.stub.Drain(request, metadata=METADATA)][-1]

    async def switch(self, role: Role) -> engine_pb2.SwitchRoleResponse:
        """Switch its role."""
        return await self.stub.SwitchRole(engine_pb2.SwitchRoleRequest(role=ROLES[role]), metadata=METADATA)

    async def assume(self, role: Role) -> engine_pb2.AssumeResponse:
        """Tell a slot its role."""
        return await self.stub.Assume(engine_pb2.AssumeRequest(role=ROLES[role]), metadata=METADATA)

    async def becomes(self, state: int) -> engine_pb2.LoadReport:
        """Wait for a state."""
        watch = self.watch()
        async with asyncio.timeout(_START_SECONDS):
            while (report := await watch.read()).state != state:
                pass
        watch.cancel()
        return report

    async def stop(self) -> None:
        """End it."""
        await self._channel.close()
        if self.process.returncode is None:
            self.process.terminate()
        await asyncio.wait_for(self.process.wait(), 30)


class BareFleet:
    """Instances of one tiny model on one zygote."""

    def __init__(self, run: Path, model: Path) -> None:
        self.run = run
        self.model = model
        self.token = TOKEN
        self.http = httpx2.AsyncClient(timeout=60, headers={"authorization": bearer(TOKEN)})
        self._agents: list[Agent] = []
        self._rooms = itertools.count(1)
        (run / "token").write_text(TOKEN)

    async def start(self, instance_id: str, role: Role, *flags: str, **engine_args: Any) -> Agent:
        """Start an instance; it does not serve yet."""
        place = ("--role", role.value, "--zygote", str(self.run / "zygote.sock"))
        return await self._start(instance_id, *place, *flags, **engine_args)

    async def start_slot(self, instance_id: str, *flags: str, **engine_args: Any) -> Agent:
        """Start a slot, which has a zygote of its own; it is not loaded yet."""
        return await self._start(instance_id, "--slot", *flags, **engine_args)

    async def _start(self, instance_id: str, *flags: str, **engine_args: Any) -> Agent:
        process = await asyncio.create_subprocess_exec(
            *_PROGRAM, "agent", "--instance-id", instance_id, "--service", "bare",
            "--model", str(self.model), "--model-name", "tiny", "--token-file", str(self.run / "token"),
            "--run-dir", str(self.run),
            "--engine-args", json.dumps({"context-length": 4096, "chunked-prefill-size": 512} | engine_args),
            "--parent-pid", str(os.getpid()), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=(self.run / f"{instance_id}.err").open("w"),
        )  # fmt: skip
        assert process.stdout is not None
        line = json.loads(await asyncio.wait_for(process.stdout.readline(), _START_SECONDS))
        assert line["event"] == "listening", line
        self._agents.append(Agent(process, line["agent"], self.run, instance_id))
        return self._agents[-1]

    async def generate(
        self, prefill: engine_pb2.Instance, decode: engine_pb2.Instance, ids: list[int], tokens: int
    ) -> dict[str, Any]:
        """Greedy output of a pair, as the decode instance answers."""
        body = self.body(prefill, ids, tokens)
        answers = await asyncio.gather(
            *(self.http.post(f"http://{side.http_address}/generate", json=body) for side in (prefill, decode))
        )
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return dict(answers[1].json())

    def body(self, prefill: engine_pb2.Instance, ids: list[int], tokens: int) -> dict[str, Any]:
        """What both sides of a request are posted."""
        room = next(self._rooms)
        return {
            "rid": f"{room:032x}",
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "bootstrap_host": prefill.bootstrap_host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": room,
        }

    async def close(self) -> None:
        """End everything."""
        await self.http.aclose()
        await asyncio.gather(*(agent.stop() for agent in self._agents))


@asynccontextmanager
async def bare_fleet() -> AsyncIterator[BareFleet]:
    """A zygote with the tiny model; instances are the caller's to start."""
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-bare-") as name:
        run = Path(name)
        zygote = await asyncio.create_subprocess_exec(
            *_PROGRAM, "zygote", "--socket", str(run / "zygote.sock"), "--parent-pid", str(os.getpid()),
            stdout=asyncio.subprocess.PIPE, stderr=(run / "zygote.err").open("w"),
        )  # fmt: skip
        fleet = None
        try:
            fleet = BareFleet(run, await _model())
            assert zygote.stdout is not None
            assert await asyncio.wait_for(zygote.stdout.readline(), _START_SECONDS)
            yield fleet
        finally:
            if fleet is not None:
                await fleet.close()
            with contextlib.suppress(ProcessLookupError):
                zygote.terminate()
            await asyncio.wait_for(zygote.wait(), 30)


async def _model() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kllm"
    process = await asyncio.create_subprocess_exec(
        *_PROGRAM, "model", "demo://tiny-random-llama", "--cache", str(cache), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return Path(json.loads(out.splitlines()[-1])["path"])
