"""The run's one shared set of real engines: 2P2D with a router, and a plain SGLang server as reference."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plain_server import PlainServer, plain_server
from router_brain.scripted_agent import ScriptedAgent
from service_under_test import Service, manifest, up, wait_idle, wait_until_async

from kllm_core.objectives import Role

TINY = "demo://tiny-random-llama"
CHUNK = 256
"""Tokens per prefill step, so that a 600-token prompt takes three."""


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    engine_args = {"chunked-prefill-size": CHUNK, "context-length": 4096}
    document = manifest(name="shared", uri=TINY, replicas=2, engine_args=engine_args)
    with up(document) as running:
        yield running


@pytest.fixture(scope="session")
async def plain(service: Service) -> AsyncIterator[PlainServer]:
    async with plain_server(service, context_tokens=4096) as server:
        yield server


@pytest.fixture
def idle_afterwards(service: Service) -> Iterator[None]:
    """Whatever a test does, two seconds later no engine holds anything."""
    yield
    wait_idle(service)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def early_router(service: Service) -> Iterator[str]:
    """A second router over the same fleet that binds early; its gRPC address."""
    with another_router(service, {"--binding": "Early"}) as told:
        yield told["grpc"]


@pytest.fixture
async def parking_router(service: Service, tmp_path: Path) -> AsyncIterator[str]:
    """A router whose only decode instance takes requests and never asks for their KV; its URL."""
    silent = await asyncio.start_server(lambda reader, _: reader.read(), "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    facts = {"http_address": address, "page_size": 16, "context_tokens": 4096, "kv_total_tokens": 1_000_000}
    agent = await ScriptedAgent("silent", Role.DECODE, token=service.token, **facts).start()
    fleet = json.loads((service.run / "fleet.json").read_text())
    fleet["instances"] = [item for item in fleet["instances"] if item["role"] == "prefill"]
    fleet["instances"].append({"id": agent.id, "role": "decode", "agent": agent.address})
    (tmp_path / "fleet.json").write_text(json.dumps(fleet))
    try:
        with another_router(service, {"--fleet": str(tmp_path / "fleet.json")}) as told:
            url = f"http://{told['http']}"
            await wait_until_async(
                lambda: httpx2.get(f"{url}/readyz").status_code == 200, seconds=30, what="a ready router"
            )
            yield url
    finally:
        await agent.stop()
        silent.close()


@contextmanager
def another_router(service: Service, changes: dict[str, str]) -> Iterator[dict[str, str]]:
    """A router started as the service's own, but for some arguments."""
    arguments = Path(f"/proc/{service.pids()['router-0']}/cmdline").read_text().split("\0")[:-1]
    own = {"--listen": "127.0.0.1:0", "--grpc-listen": "127.0.0.1:0", "--parent-pid": str(os.getpid())}
    for flag, value in (own | changes).items():
        arguments[arguments.index(flag) + 1] = value
    router = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(router.stdout.readline())
    finally:
        router.terminate()
        assert router.wait(20) == 0
        router.stdout.close()
