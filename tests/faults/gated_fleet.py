"""A fleet of real engines with gates, each behind proxies, and one real router: what faults are aimed at."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from faults import gates
from faults.gated_instance import GatedInstance

from kllm_core.authentication import METADATA_KEY, bearer, create_token_file
from kllm_core.objectives import Role

CHUNK_TOKENS = 128
CONTEXT_TOKENS = 4096
MODEL_NAME = "test-model"
_TINY = "demo://tiny-random-llama"
_POLL_SECONDS = 0.02
_ENGINE_ARGS = {"chunked-prefill-size": CHUNK_TOKENS, "context-length": CONTEXT_TOKENS}
_HELD = (
    "running_requests",
    "queued_requests",
    "parked_requests",
    "parked_tokens",
    "kv_used_tokens",
    "transferring_requests",
)


class GatedFleet:
    """The whole of it. Make it with `gated_fleet`.

    Attributes:
        url: the router's address.
        instances: those that serve, by id.
    """

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.gates = folder / "gates"
        self.url = ""
        self.token = ""
        self.instances: dict[str, GatedInstance] = {}
        self.router: asyncio.subprocess.Process | None = None
        self._stack = stack
        self._model = ""
        self._numbers = itertools.count()

    # --- bringing it up

    async def start(self, counts: dict[Role, int]) -> None:
        """Zygote, engines, proxies, router; ends when the router is ready."""
        (self.folder / "logs").mkdir()
        self.gates.mkdir()
        self.token = create_token_file(self.folder / "token")
        await self._spawn(
            "zygote", sys.executable, "-m", "faults.gated_zygote", str(self.folder / "z.sock"), str(os.getpid())
        )
        self._model = await self._resolve_model()
        await self.add(*(role for role, count in counts.items() for _ in range(count)))
        await self.start_router()
        await self.ready()

    async def add(self, *roles: Role) -> None:
        """Start instances, all at once, and list them for the router."""
        started = [await self._start_agent(role) for role in roles]
        log = self.folder / "logs" / "zygote.log"
        await asyncio.gather(*(instance.serve(self.token, log) for instance in started))
        self.instances |= {instance.id: instance for instance in started}
        self._write_fleet()

    async def remove(self, instance: GatedInstance) -> None:
        """Take an instance from the list and end it."""
        self.instances.pop(instance.id, None)
        self._write_fleet()
        await instance.close()

    async def start_router(self, *extra: str) -> None:
        """A router over the fleet."""
        arguments = {
            "--listen": "127.0.0.1:0", "--grpc-listen": "127.0.0.1:0", "--fleet": self._fleet_file,
            "--token-file": self.folder / "token", "--model-name": MODEL_NAME, "--tokenizer": self._model,
            "--page-size": 16, "--parent-pid": os.getpid(),
        }  # fmt: skip
        words = [str(word) for pair in arguments.items() for word in pair]
        self.router = await self._spawn("router", sys.executable, "-m", "kllm_router.main", *words, *extra)
        assert self.router.stdout is not None
        listening = json.loads(await self.router.stdout.readline())
        self.url = f"http://{listening['http']}"

    async def ready(self, *, seconds: float = 30.0) -> None:
        """Wait until the router takes requests on every instance."""
        wanted = set(self.instances)
        told: list[dict[str, Any]] = []

        async def serving() -> bool:
            told[:] = await self.status()
            return {item["id"] for item in told if item["state"] == "Serving" and item["connected"]} == wanted

        await until(serving, seconds=seconds, what=lambda: f"{sorted(wanted)} serving, there are: {told}")

    async def heal(self) -> None:
        """Whole again: gates open, proxies passing, dead and stopped instances replaced, all engines idle."""
        for file in self.gates.iterdir():
            file.unlink()
        lost = []
        for instance in list(self.instances.values()):
            instance.restore()
            if not instance.is_well:
                lost.append(instance)
        for instance in lost:
            await self.remove(instance)
        if lost:
            await self.add(*(instance.role for instance in lost))
        await self.ready()

    # --- looking at it

    def of(self, role: Role) -> list[GatedInstance]:
        """Instances of a role."""
        return [instance for instance in self.instances.values() if instance.role is role]

    async def status(self) -> list[dict[str, Any]]:
        """Instances as the router sees them."""
        async with httpx2.AsyncClient(timeout=10) as client:
            headers = {METADATA_KEY: bearer(self.token)}
            answer = await client.get(f"{self.url}/kllm/v1/status", headers=headers)
            return list(answer.raise_for_status().json()["instances"])

    async def held(self) -> dict[str, dict[str, Any]]:
        """What instances hold for requests; empty when all are idle."""
        busy = {}
        for item in await self.status():
            load = item.get("load") or {}
            if counts := {name: load[name] for name in _HELD if load.get(name)}:
                busy[item["id"]] = counts
        return busy

    async def idle(self, *, seconds: float = 5.0) -> float:
        """Wait until no instance holds anything; returns the seconds that it took."""
        last: dict[str, Any] = {}

        async def nothing() -> bool:
            last.clear()
            last.update(await self.held())
            return not last

        return await until(nothing, seconds=seconds, what=lambda: f"idle engines, held: {last}")

    def router_descriptors(self) -> int:
        """Open file descriptors of the router."""
        assert self.router is not None
        return len(list(Path(f"/proc/{self.router.pid}/fd").iterdir()))

    # --- stages

    def arm(self, stage: str) -> None:
        """Hold what comes to a stage."""
        if stage == "parked":
            for instance in self.of(Role.PREFILL):
                assert instance.proxy is not None
                instance.proxy.parked.clear()
                instance.proxy.telling.clear()
        else:
            gates.hold_file(self.gates, stage).touch()

    async def reached(self, stage: str, *, seconds: float = 30.0) -> GatedInstance:
        """Wait until something is held at an armed stage; returns the instance that holds it."""
        found: list[GatedInstance] = []

        async def there() -> bool:
            found.extend(instance for instance in self.instances.values() if self._holds(instance, stage))
            return bool(found)

        await until(there, seconds=seconds, what=lambda: f"a request at {stage}")
        return found[0]

    def serving(self, role: Role) -> GatedInstance:
        """The instance of a role that has had the newest request."""
        return self.instances[gates.served_file(self.gates, role.value).read_text()]

    def release(self, stage: str) -> None:
        """Let go what is held."""
        if stage == "parked":
            for instance in self.of(Role.PREFILL):
                assert instance.proxy is not None
                instance.proxy.telling.set()
        else:
            gates.hold_file(self.gates, stage).unlink()

    def _holds(self, instance: GatedInstance, stage: str) -> bool:
        if stage == "parked":
            return instance.proxy is not None and instance.proxy.parked.is_set()
        return gates.mark_file(self.gates, stage, instance.id).exists()

    # --- processes

    async def _start_agent(self, role: Role) -> GatedInstance:
        instance_id = f"{role.value}-{next(self._numbers)}"
        arguments = {
            "--instance-id": instance_id, "--service": "faults", "--role": role.value, "--model": self._model,
            "--model-name": MODEL_NAME, "--listen": "127.0.0.1:0", "--token-file": self.folder / "token",
            "--zygote": self.folder / "z.sock", "--run-dir": self.folder, "--page-size": 16,
            "--engine-args": json.dumps(_ENGINE_ARGS), "--parent-pid": os.getpid(),
        }  # fmt: skip
        words = [str(word) for pair in arguments.items() for word in pair]
        agent = await self._spawn(instance_id, sys.executable, "-m", "kllm_engine.main", "agent", *words)
        return GatedInstance(instance_id, role, agent, self.folder / "logs" / f"{instance_id}.log")

    async def _resolve_model(self) -> str:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        child = await self._spawn(
            "model", sys.executable, "-m", "kllm_engine.main", "model", _TINY, "--cache", f"{cache}/kllm"
        )
        assert child.stdout is not None
        path = ""
        while line := await child.stdout.readline():
            path = json.loads(line).get("path", path)
        assert path, (self.folder / "logs" / "model.log").read_text()
        return path

    async def _spawn(self, name: str, *words: str) -> asyncio.subprocess.Process:
        tests, environment = Path(__file__).parents[1], dict(os.environ)
        environment["PYTHONPATH"] = str(tests)
        environment[gates.FOLDER_VARIABLE] = str(self.gates)
        with (self.folder / "logs" / f"{name}.log").open("w") as log:
            child = await asyncio.create_subprocess_exec(
                *words, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        self._stack.push_async_callback(_end, child)
        return child

    def _write_fleet(self) -> None:
        listed = [
            {"id": item.id, "role": item.role.value, "agent": item.proxy.address}
            for item in self.instances.values()
            if item.proxy is not None
        ]
        partial = self._fleet_file.with_suffix(".partial")
        partial.write_text(json.dumps({"version": 1, "service": "faults", "instances": listed}))
        partial.rename(self._fleet_file)

    @property
    def _fleet_file(self) -> Path:
        return self.folder / "fleet.json"


@asynccontextmanager
async def gated_fleet(*, prefill: int, decode: int) -> AsyncIterator[GatedFleet]:
    """A fleet for the length of the context."""
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-f-") as name:
        async with AsyncExitStack() as stack:
            fleet = GatedFleet(Path(name), stack)
            try:
                await fleet.start({Role.PREFILL: prefill, Role.DECODE: decode})
                yield fleet
            finally:
                await asyncio.gather(*(instance.close() for instance in fleet.instances.values()))


async def until(condition: Callable[[], Any], *, seconds: float, what: Callable[[], str]) -> float:
    """Poll an asynchronous condition; returns the seconds that it took."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s: {what()}")
        await asyncio.sleep(_POLL_SECONDS)
    return time.monotonic() - began


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    await child.wait()
