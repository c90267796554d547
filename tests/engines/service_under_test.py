"""One `kllm up` and what tests ask of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

KLLM = (sys.executable, "-m", "kllm.main")


def manifest(*, name: str, uri: str, replicas: int, engine_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """An InferenceService with as many prefill as decode instances."""
    role = {"minReplicas": replicas, "maxReplicas": replicas, "engineArgs": engine_args or {}}
    spec = {
        "model": {"uri": uri, "name": "test-model"},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
        "prefill": dict(role),
        "decode": dict(role),
    }
    return {"apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": name}, "spec": spec}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """A service that is up."""

    process: subprocess.Popen[str]
    url: str
    grpc: str
    run: Path
    environment: dict[str, str]

    @property
    def token(self) -> str:
        """The fleet token."""
        return (self.run / "token").read_text().strip()

    def state(self) -> dict[str, Any]:
        """state.json."""
        return json.loads((self.run / "state.json").read_text())

    def pids(self) -> dict[str, int]:
        """Process numbers by name, of everything that `kllm up` started itself."""
        return {record["id"]: record["pid"] for record in self.state()["processes"]}

    def instances(self) -> list[dict[str, Any]]:
        """Instances as the router sees them."""
        return httpx2.get(f"{self.url}/kllm/v1/status", timeout=10).raise_for_status().json()["instances"]

    def command(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run another `kllm` command in the same environment."""
        return subprocess.run(
            [*KLLM, *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )


HELD = (
    "running_requests",
    "queued_requests",
    "parked_requests",
    "parked_tokens",
    "kv_used_tokens",
    "transferring_requests",
)


def held(service: Service) -> dict[str, dict[str, Any]]:
    """What instances hold for requests; empty when all are idle."""
    busy = {}
    for instance in service.instances():
        load = instance.get("load") or {}
        counts = {name: load[name] for name in HELD if load.get(name)}
        if counts:
            busy[instance["id"]] = counts
    return busy


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str | Callable[[], str]) -> float:
    """Poll a condition; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return time.monotonic() - began


async def wait_until_async(condition: Callable[[], bool], *, seconds: float, what: str | Callable[[], str]) -> float:
    """`wait_until` beside a running loop."""
    return await asyncio.to_thread(wait_until, condition, seconds=seconds, what=what)


def wait_idle(service: Service, *, seconds: float = 2.0) -> float:
    """Wait until no instance holds anything; returns the seconds that it took."""
    return wait_until(lambda: not held(service), seconds=seconds, what=lambda: f"idle engines, held: {held(service)}")


def environment_in(folder: Path) -> dict[str, str]:
    """Environment whose run directories lie in `folder`."""
    return os.environ | {"XDG_RUNTIME_DIR": str(folder)}


def start(document: dict[str, Any], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begin `kllm up`; its events come as JSON lines."""
    path = folder / f"{document['metadata']['name']}.yaml"
    path.write_text(yaml.safe_dump(document))
    return subprocess.Popen(
        [*KLLM, "up", "-f", str(path), "--json", *arguments],
        env=environment_in(folder),
        stdout=subprocess.PIPE,
        stderr=(folder / "up.err").open("w"),
        text=True,
    )


def wait_event(process: subprocess.Popen[str], event: str, *, errors: Path | None = None) -> dict[str, Any]:
    """Read events until one of this name comes; `errors` is the file that explains why none does."""
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if told["event"] == event:
            return told
        seen.append(line)
    told = f"`kllm up` ended with {process.wait(10)} before {event!r}"
    raise AssertionError("\n".join([told, *seen[-20:], errors.read_text() if errors is not None else ""]))


@contextmanager
def up(document: dict[str, Any], *arguments: str) -> Iterator[Service]:
    """A service for the length of the context; stopped by SIGTERM, which must work."""
    # Short: the paths of Unix sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kllm-test-") as name:
        folder = Path(name)
        process = start(document, folder, "--port", str(free_port()), *arguments)
        try:
            serving = wait_event(process, "serving", errors=folder / "up.err")
            reader = threading.Thread(target=deque, args=(process.stdout, 0), daemon=True)
            reader.start()  # a pipe that nobody reads would stop `kllm up` at its next decision
            run = folder / "kllm" / document["metadata"]["name"]
            service = Service(process, serving["url"], serving["grpc"], run, environment_in(folder))
            wait_until(
                lambda: httpx2.get(f"{service.url}/readyz").status_code == 200, seconds=30, what="a ready router"
            )
            yield service
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            finally:
                process.kill()
                process.stdout.close()


def descendants(pid: int) -> set[int]:
    """Numbers of all processes below one, found by their parents."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), set()).add(int(entry.name))
    found, todo = set(), [pid]
    while todo:
        below = children.get(todo.pop(), set())
        found |= below
        todo.extend(below)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that run; a zombie does not."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            running.add(pid)
    return running
