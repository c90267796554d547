"""What a real prefill engine's agent tells of single requests: done, pushed back, released."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2
import pytest
from plain_server import PlainServer, model_path
from service_under_test import Service

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc

pytestmark = pytest.mark.engines

PARK_SECONDS = 1.5
RIDS = random.Random(7)


@dataclass(frozen=True)
class Engine:
    """An engine that tests talk to without a router."""

    stub: Any
    metadata: tuple[tuple[str, str], ...]
    facts: engine_pb2.Instance

    async def load(self) -> engine_pb2.LoadReport:
        """One report."""
        call = self.stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=50), metadata=self.metadata)
        report = await call.read()
        call.cancel()
        return report

    async def post(self, body: dict[str, Any]) -> httpx2.Response:
        """A generation, asked of this engine alone."""
        async with httpx2.AsyncClient(timeout=60) as client:
            headers = dict(self.metadata)
            return await client.post(f"http://{self.facts.http_address}/generate", json=body, headers=headers)


@pytest.fixture(scope="module")
def prefill_agent(service: Service) -> Iterator[str]:
    """A prefill instance of its own from the shared zygote, with small chunks and little patience; its agent.

    SGLang orders its prompts itself: in kLLM's order a prompt that gives way keeps its KV, and none is pushed back.
    """
    arguments = {
        "--instance-id": "extra", "--service": "shared", "--role": "prefill", "--model": model_path(service),
        "--model-name": "test-model", "--listen": "127.0.0.1:0", "--token-file": service.run / "token",
        "--zygote": service.run / "zygote.sock", "--run-dir": service.run, "--page-size": 16, "--kv-type": "Auto",
        "--park-timeout-seconds": PARK_SECONDS,
        "--engine-args": json.dumps({"chunked-prefill-size": 64, "context-length": 4096, "schedule-policy": "lpm"}),
    }  # fmt: skip
    command = [sys.executable, "-m", "kllm_engine.main", "agent"]
    command += [str(part) for pair in arguments.items() for part in pair]
    with (service.run / "logs" / "extra.log").open("w") as log:
        agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        listening, serving = json.loads(agent.stdout.readline()), json.loads(agent.stdout.readline())
        assert serving["event"] == "serving"
        yield listening["agent"]
    finally:
        agent.terminate()
        assert agent.wait(20) == 0
        agent.stdout.close()


@pytest.fixture
async def prefill(service: Service, prefill_agent: str) -> AsyncIterator[Engine]:
    async with engine_at(prefill_agent, service.token) as engine:
        yield engine


@pytest.fixture
async def decode(service: Service) -> AsyncIterator[Engine]:
    """One of the shared decode instances."""
    fleet = json.loads((service.run / "fleet.json").read_text())
    address = next(item["agent"] for item in fleet["instances"] if item["role"] == "decode")
    async with engine_at(address, service.token) as engine:
        yield engine


@asynccontextmanager
async def engine_at(address: str, token: str) -> AsyncIterator[Engine]:
    """The engine behind an agent."""
    metadata = call_metadata(token)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineAgentStub(channel)
        facts = await stub.GetInstance(engine_pb2.GetInstanceRequest(), metadata=metadata, timeout=10)
        yield Engine(stub, metadata, facts)


@pytest.fixture
async def events(prefill: Engine) -> AsyncIterator[Any]:
    """Live events of the prefill instance: `await events(rid)` is the next one of a request."""
    call = prefill.stub.WatchRequests(engine_pb2.WatchRequestsRequest(), metadata=prefill.metadata)
    await call.initial_metadata()
    unread: dict[str, asyncio.Queue[engine_pb2.RequestEvent]] = {}

    def queue(rid: str) -> asyncio.Queue[engine_pb2.RequestEvent]:
        return unread.setdefault(rid, asyncio.Queue())

    async def follow() -> None:
        while (event := await call.read()) is not grpc.aio.EOF:
            queue(event.request_id).put_nowait(event)

    async def following(rid: str) -> engine_pb2.RequestEvent:
        async with asyncio.timeout(30):
            return await queue(rid).get()

    task = asyncio.ensure_future(follow())
    yield following
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def request(prefill: Engine, length: int, *, seed: int, tokens: int = 8) -> dict[str, Any]:
    return {
        "rid": f"{RIDS.getrandbits(128):032x}",
        "input_ids": [random.Random(seed * 99_991 + n).randrange(10, 500) for n in range(length)],
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "bootstrap_host": prefill.facts.bootstrap_host,
        "bootstrap_port": prefill.facts.bootstrap_port,
        "bootstrap_room": RIDS.getrandbits(62),
    }


async def test_the_contract_s_facts_are_those_of_the_engine(prefill: Engine):
    facts = prefill.facts

    assert facts.role == engine_pb2.ROLE_PREFILL
    assert facts.state == engine_pb2.INSTANCE_STATE_SERVING
    assert engine_pb2.BINDING_LATE in facts.bindings
    assert (facts.page_size, facts.context_tokens, facts.engine_version) == (16, 4090, "0.5.21")
    assert {phase.name for phase in facts.start_phases} == {"zygote", "fork", "load", "ready"}


async def test_calls_without_the_fleet_token_are_refused(prefill: Engine):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill.stub.GetInstance(engine_pb2.GetInstanceRequest(), timeout=10)

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_parked_kv_that_no_decode_instance_takes_is_released_in_time(prefill: Engine, events):
    body = request(prefill, 600, seed=1)

    answer = asyncio.ensure_future(prefill.post(body))
    done = await events(body["rid"])
    parked = await load_with_parked(prefill)
    released = await events(body["rid"])

    assert (done.kind, done.prompt_tokens) == (engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE, 600)
    assert (parked.parked_requests, parked.parked_tokens) == (1, 600)
    assert (released.kind, released.reason) == (engine_pb2.REQUEST_EVENT_KIND_RELEASED, "ParkTimeout")
    assert PARK_SECONDS <= released.parked_seconds < PARK_SECONDS + 1.0
    assert (await answer).status_code == 500
    await wait_idle(prefill)


async def test_a_subscriber_that_comes_late_is_told_of_what_is_parked(prefill: Engine, events):
    body = request(prefill, 100, seed=2)
    answer = asyncio.ensure_future(prefill.post(body))
    await events(body["rid"])

    late = prefill.stub.WatchRequests(engine_pb2.WatchRequestsRequest(), metadata=prefill.metadata)
    told = await late.read()
    late.cancel()

    assert (told.request_id, told.kind) == (body["rid"], engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE)
    await answer


async def test_a_prompt_that_is_pushed_back_says_so_and_is_served_once_it_is_bound(
    prefill: Engine, decode: Engine, plain: PlainServer, events
):
    unbound, bound = request(prefill, 3500, seed=3), request(prefill, 200, seed=4)
    first = asyncio.ensure_future(prefill.post(unbound))
    await wait_until_running(prefill)

    # The bound prompt's decode instance has asked for its KV, so SGLang lets it go before the unbound one.
    second = [asyncio.ensure_future(decode.post(bound)), asyncio.ensure_future(prefill.post(bound))]
    pushed_back = await events(unbound["rid"])
    late = await decode.post(unbound)

    assert (pushed_back.kind, pushed_back.reason) == (engine_pb2.REQUEST_EVENT_KIND_REQUEUED, "Yielded")
    assert late.json()["output_ids"] == await plain.generate(unbound["input_ids"], 8)
    assert (await second[0]).json()["output_ids"] == await plain.generate(bound["input_ids"], 8)
    await asyncio.gather(first, *second)
    await wait_idle(prefill)


async def load_with_parked(engine: Engine) -> engine_pb2.LoadReport:
    async with asyncio.timeout(PARK_SECONDS):
        while not (load := await engine.load()).parked_requests:
            pass
        return load


async def wait_until_running(engine: Engine) -> None:
    async with asyncio.timeout(20):
        while not (await engine.load()).running_requests:
            pass


async def wait_idle(engine: Engine) -> None:
    """No KV is held, two seconds later at most."""
    async with asyncio.timeout(2):
        while (load := await engine.load()).kv_used_tokens or load.running_requests or load.parked_requests:
            pass
