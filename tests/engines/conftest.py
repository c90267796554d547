"""The run's one shared set of real engines: 2P2D with a router, and a plain SGLang server as reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plain_server import PlainServer, plain_server
from service_under_test import Service, manifest, up, wait_idle, wait_until

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
    arguments = Path(f"/proc/{service.pids()['router-0']}/cmdline").read_text().split("\0")[:-1]
    for flag, value in {
        "--binding": "Early",
        "--listen": "127.0.0.1:0",
        "--grpc-listen": "127.0.0.1:0",
        "--parent-pid": str(os.getpid()),
    }.items():
        arguments[arguments.index(flag) + 1] = value
    router = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        told = json.loads(router.stdout.readline())
        wait_until(
            lambda: httpx2.get(f"http://{told['http']}/readyz").status_code == 200, seconds=30, what="a ready router"
        )
        yield told["grpc"]
    finally:
        router.terminate()
        assert router.wait(20) == 0
