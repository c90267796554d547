"""Runs agents as processes against fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio
from engine_agent.fake_engine import control_path

from kllm_core.authentication import bearer
from kllm_core.contracts.engine.v1 import engine_pb2_grpc
from kllm_engine.agent.processes import Process, inspect, members

HERE = Path(__file__).parent
PYTHON = (sys.executable,)
TOKEN = "a-token-for-tests-only"
DEADLINE_SECONDS = 30.0


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until the condition holds and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return value


async def start_zygote(run_dir: Path) -> asyncio.subprocess.Process:
    """A zygote of fake engines that accepts connections."""
    path = run_dir / "zygote.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "fake_engine.py"), "--socket", str(path), "--parent-pid", str(os.getpid()),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)
    return process


class AgentProcess:
    """One agent, its announcements and its channel."""

    def __init__(self, run_dir: Path, instance_id: str) -> None:
        self.run_dir = run_dir
        self.instance_id = instance_id
        self.process: asyncio.subprocess.Process
        self.address = ""
        self._channel: grpc.aio.Channel | None = None

    async def start(
        self,
        *flags: str,
        role: str = "prefill",
        engine_args: dict[str, Any] | None = None,
        program: Sequence[str] = (*PYTHON, "-m", "kllm_engine.main"),
        stderr: IO[bytes] | None = None,
    ) -> None:
        """Start it and wait until it listens."""
        zygote = ["--role", role, "--zygote", str(self.run_dir / "zygote.sock")]
        await self._start(program, *zygote, *flags, engine_args=engine_args, stderr=stderr)

    async def start_slot(self, *flags: str, engine_args: dict[str, Any] | None = None, **environment: str) -> None:
        """Start it as a slot whose own zygote forks fake engines, and wait until it listens."""
        program = [*PYTHON, str(HERE / "slot_agent.py")]
        await self._start(program, "--slot", *flags, engine_args=engine_args, environment=environment)

    async def _start(
        self,
        program: Sequence[str],
        *flags: str,
        engine_args: dict[str, Any] | None,
        environment: dict[str, str] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        token_file = self.run_dir / "token"
        token_file.write_text(TOKEN)
        command = [
            *program, "agent", "--instance-id", self.instance_id, "--service", "chat",
            "--model", str(model_folder(self.run_dir)), "--model-name", "tiny", "--token-file", str(token_file),
            "--run-dir", str(self.run_dir),
            "--engine-args", json.dumps(engine_args or {}), "--parent-pid", str(os.getpid()),
            "--heartbeat-timeout-seconds", "1.5", "--hang-grace-seconds", "1", *flags,
        ]  # fmt: skip
        self.process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, env=os.environ | (environment or {})
        )
        self.address = (await self.event("listening"))["agent"]

    async def event(self, name: str) -> dict[str, Any]:
        """The next announcement, which must be of this name."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_SECONDS)
        event: dict[str, Any] = json.loads(line)
        assert event["event"] == name, event
        return event

    async def exit_code(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.wait_for(self.process.wait(), DEADLINE_SECONDS)

    def stub(self) -> engine_pb2_grpc.EngineAgentStub:
        """Client without a token."""
        return engine_pb2_grpc.EngineAgentStub(self.channel)

    @property
    def channel(self) -> grpc.aio.Channel:
        """Channel to its gRPC server."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address)
        return self._channel

    def order(self, **order: Any) -> None:
        """Make the fake scheduler do something."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(
                json.dumps(order).encode(), control_path(str(self.run_dir / f"{self.instance_id}.plugin.sock"))
            )

    def engine_processes(self) -> list[Process]:
        """The engine's processes, found by the log that they write."""
        log = str(self.run_dir / "logs" / f"{self.instance_id}.engine.log")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _writes(int(entry.name), log):
                return members(os.getpgid(int(entry.name)))
        return []

    def zygotes(self) -> list[int]:
        """Process ids of zygotes of its own that live."""
        found = (inspect(pid) for pid in _children(self.process.pid))
        return [process.pid for process in found if process is not None and process.state != "Z"]

    def part(self, title: str) -> Process:
        """One process of the engine by its title."""
        return next(process for process in self.engine_processes() if process.title.startswith(title))

    async def stop(self) -> None:
        """End it however it is."""
        if self._channel is not None:
            await self._channel.close()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def model_folder(run_dir: Path) -> Path:
    """A folder that passes for a model's."""
    folder = run_dir / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").touch()
    return folder


def authorised() -> tuple[tuple[str, str], ...]:
    """Metadata with the token."""
    return (("authorization", bearer(TOKEN)),)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _writes(pid: int, path: str) -> bool:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink()) == path
    except OSError:
        return False
