"""`kllm up` of one prefill and one decode instance, and beside them an early-binding router and a plain server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import yaml
from asking import Endpoint

from kllm_core.authentication import METADATA_KEY, bearer
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role
from kllm_engine.sglang.arguments import EngineSettings, detect_device, launch
from kllm_engine.start.client import ZygoteClient

MODEL_NAME = "model"
PAIR_ONLY = ("--disaggregation", "--optimistic-prefill", "--kv-events", "--enable-pd-role-switch")


def manifest(uri: str, engine_args: dict[str, Any], decode_only: dict[str, Any] | None = None) -> dict[str, Any]:
    role = {"minReplicas": 1, "maxReplicas": 1}
    spec = {
        "model": {"uri": uri, "name": MODEL_NAME},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
        "prefill": role | {"engineArgs": engine_args},
        "decode": role | {"engineArgs": engine_args | (decode_only or {})},
    }
    return {"apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "gpu"}, "spec": spec}


@dataclass
class Service:
    """A service that is up."""

    url: str
    run: Path
    folder: Path
    ready_seconds: float
    steps: list[dict[str, Any]]

    @property
    def token(self) -> str:
        return (self.run / "token").read_text().strip()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, MODEL_NAME)

    def pids(self) -> dict[str, int]:
        return {
            record["id"]: record["pid"] for record in json.loads((self.run / "state.json").read_text())["processes"]
        }

    def command_line(self, name: str) -> list[str]:
        return Path(f"/proc/{self.pids()[name]}/cmdline").read_text().split("\0")[:-1]

    @property
    def model(self) -> Path:
        arguments = self.command_line("router-0")
        return Path(arguments[arguments.index("--tokenizer") + 1])

    def instances(self) -> dict[str, dict[str, Any]]:
        """What each agent says of its instance, its start's phases in seconds among it."""
        told = {}
        for entry in json.loads((self.run / "fleet.json").read_text())["instances"]:
            with grpc.insecure_channel(entry["agent"]) as channel:
                stub = engine_pb2_grpc.EngineAgentStub(channel)
                metadata = [(METADATA_KEY, bearer(self.token))]
                found = stub.GetInstance(engine_pb2.GetInstanceRequest(), metadata=metadata, timeout=10)
            told[found.instance_id] = {
                "role": engine_pb2.Role.Name(found.role),
                "phases": {phase.name: round(phase.seconds, 3) for phase in found.start_phases},
                "kv_total_tokens": found.kv_total_tokens,
                "bindings": [engine_pb2.Binding.Name(binding) for binding in found.bindings],
            }
        return told

    def loads(self) -> dict[str, dict[str, Any]]:
        instances = httpx2.get(f"{self.url}/kllm/v1/status", timeout=10).raise_for_status().json()["instances"]
        return {instance["id"]: instance.get("load") or {} for instance in instances}


@contextmanager
def up(document: dict[str, Any]) -> Iterator[Service]:
    """Serve a manifest for the length of the context."""
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-gpu-") as name:
        folder = Path(name)
        path = folder / "service.yaml"
        path.write_text(yaml.safe_dump(document))
        command = [sys.executable, "-m", "kllm.main", "up", "-f", str(path), "--json", "--port", str(free_port())]
        environment = os.environ | {"XDG_RUNTIME_DIR": name}
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        steps: list[dict[str, Any]] = []
        run = folder / "kllm" / "gpu"
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "serving":
                    break
                if event.get("state") == "done":
                    steps.append({"name": event["name"], "seconds": event["seconds"]})
            else:
                raise RuntimeError("kllm up did not serve")  # noqa: TRY301  the logs follow
            yield Service(event["url"], run, folder, time.monotonic() - began, steps)
        except BaseException:
            print(logs(run), file=sys.stderr, flush=True)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            finally:
                process.kill()


def logs(run: Path, *, lines: int = 25) -> str:
    """The ends of all logs."""
    found = sorted((run / "logs").glob("*.log")) if (run / "logs").is_dir() else []
    return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-lines:]) for path in found)


@contextmanager
def early_router(service: Service) -> Iterator[Endpoint]:
    """A second router over the same instances, which binds P and D together on arrival."""
    arguments = service.command_line("router-0")
    anywhere = {"--listen": "127.0.0.1:0", "--grpc-listen": "127.0.0.1:0"}
    for flag, value in (anywhere | {"--binding": "Early", "--parent-pid": str(os.getpid())}).items():
        arguments[arguments.index(flag) + 1] = value
    router = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://{json.loads(router.stdout.readline())['http']}"
        wait_for(f"{url}/readyz")
        yield Endpoint(url, MODEL_NAME)
    finally:
        router.terminate()
        router.communicate(timeout=20)


@asynccontextmanager
async def plain_server(service: Service, engine_args: dict[str, Any]) -> AsyncIterator[tuple[Endpoint, float]]:
    """An SGLang server without disaggregation, from the service's zygote; with the seconds until it was ready."""
    port = free_port()
    started = launch(
        EngineSettings(
            role=Role.PREFILL, model_path=service.model, model_name=MODEL_NAME, http_port=port,
            bootstrap_port=free_port(), distributed_port=free_port(), device=detect_device(), api_key=service.token,
            engine_args=engine_args,
        )
    )  # fmt: skip
    began = time.monotonic()
    server = await ZygoteClient(service.run / "zygote.sock").fork(
        name="plain", args=in_one_piece(started.arguments), env=started.environment,
        log=service.run / "logs" / "plain.log",
    )  # fmt: skip
    try:
        await asyncio.to_thread(wait_for, f"http://127.0.0.1:{port}/ready", token=service.token)
        yield Endpoint(f"http://127.0.0.1:{port}", MODEL_NAME, service.token), time.monotonic() - began
    finally:
        await server.kill()
        await server.wait_exit()
        await server.close()


def in_one_piece(arguments: tuple[str, ...]) -> list[str]:
    """Without the arguments that make it half of a pair."""
    kept: list[str] = []
    keeping = True
    for argument in arguments:
        if argument.startswith("--"):
            keeping = not argument.startswith(PAIR_ONLY)
        if keeping:
            kept.append(argument)
    return kept


def wait_for(url: str, *, token: str | None = None, seconds: float = 240) -> None:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx2.get(url, headers=headers, timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} was not ready within {seconds:.0f} s")
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
