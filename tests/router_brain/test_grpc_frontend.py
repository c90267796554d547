from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import orjson
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loop.virtual_time import run_virtually
from router_brain.brain_helpers import wait_until, write_model

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.grpc_server import GrpcServer
from kllm_router.frontend.grpc_service import Deltas, RouterService
from kllm_router.frontend.keys import KeyRing, parse_keys
from kllm_router.frontend.openai import OpenAiPreparer
from kllm_router.interfaces import ApiError, EngineRequest, RequestSummary, StageTimes, Usage
from kllm_router.service_levels import ServiceLevels, ServiceLevelsService

Generate = router_pb2.GenerateRequest


def event(text: str, ids: list[int], count: int, reason: str | None = None) -> bytes:
    finish = {"type": reason} if reason else None
    meta = {"completion_tokens": count, "prompt_tokens": 3, "cached_tokens": 0, "finish_reason": finish}
    return b"data: " + orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta}) + b"\n\n"


ANSWER = [event("Hel", [1], 1), event("Hello", [1, 2], 2), event("Hello!", [1, 2, 3], 3, "stop"), b"data: [DONE]\n\n"]


class ScriptedPairing:
    """Stands for the pairing; its exchange gives scripted parts."""

    def __init__(self) -> None:
        self.parts: list[bytes] = list(ANSWER)
        self.error: ApiError | None = None
        self.hang = False
        self.requests: list[EngineRequest] = []
        self.left: list[str] = []

    @asynccontextmanager
    async def open(
        self, request: EngineRequest, *, arrived: float, deadline_seconds: float | None
    ) -> AsyncIterator[Any]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        side = SimpleNamespace(endpoint=SimpleNamespace(instance_id="i0"))
        times = StageTimes(queue=0.1, prefill=0.2, bind=0.3, transfer=0.4, first_token=1.0)
        progress = SimpleNamespace(cached_tokens=16)
        try:
            yield SimpleNamespace(chunks=self._chunks, times=times, progress=progress, prefill=side, decode=side)
        finally:
            self.left.append(request.rid)

    async def _chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        if self.hang:
            await asyncio.Event().wait()


@pytest.fixture
def pairing() -> ScriptedPairing:
    return ScriptedPairing()


@pytest.fixture
def levels() -> ServiceLevels:
    return ServiceLevels("router-0")


@pytest.fixture
def readiness() -> SimpleNamespace:
    return SimpleNamespace(ready=True)


@pytest.fixture
async def channel(
    tmp_path: Path, pairing: ScriptedPairing, levels: ServiceLevels, readiness: SimpleNamespace
) -> AsyncIterator[grpc.aio.Channel]:
    preparer = OpenAiPreparer.load(write_model(tmp_path), "test-model")
    preparer.listeners.append(levels.arrived)
    service = RouterService(preparer=preparer, pairing=pairing, gate=Gate(keys=KeyRing(parse_keys("key"))))
    server = GrpcServer(router=service, levels=levels, ready=lambda: readiness.ready)
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as made:
        yield made
    await server.stop(0)
    preparer.close()


async def answers(channel: grpc.aio.Channel, request: Generate, key: str = "key") -> list[router_pb2.GenerateResponse]:
    metadata = (("authorization", f"Bearer {key}"),)
    stub = router_pb2_grpc.RouterStub(channel)
    return [answer async for answer in stub.Generate(request, metadata=metadata, timeout=20)]


async def test_a_generation_is_started_streamed_and_finished(channel, pairing):
    started, *chunks, finished = await answers(channel, Generate(prompt="Hello"))

    assert started.started.request_id == pairing.requests[0].rid
    assert [chunk.chunk.text for chunk in chunks] == ["Hel", "lo", "!"]
    assert [list(chunk.chunk.token_ids) for chunk in chunks] == [[1], [2], [3]]
    end = finished.finished
    assert (end.reason, end.completion_tokens, end.cached_tokens) == ("stop", 3, 16)
    assert (end.prefill_instance, end.decode_instance) == ("i0", "i0")
    assert end.times.first_token == pytest.approx(1.0)
    assert end.prompt_tokens == started.started.prompt_tokens == len(pairing.requests[0].input_ids)


async def test_sampling_reaches_the_engine_under_its_names(channel, pairing):
    sampling = router_pb2.Sampling(max_tokens=7, temperature=0.5, seed=3, stop=["x"], stop_token_ids=[9], grammar="g")
    await answers(channel, Generate(tokens=router_pb2.TokenIds(ids=[4, 5]), sampling=sampling))
    await answers(channel, Generate(chat=router_pb2.Messages(messages=[router_pb2.Message(role="user", content="Hi")])))

    first, second = pairing.requests
    assert first.path == "/generate"
    assert first.stream
    assert first.body == {
        "input_ids": [4, 5],
        "sampling_params": {
            "max_new_tokens": 7, "temperature": 0.5, "sampling_seed": 3, "stop": ["x"], "stop_token_ids": [9],
            "ebnf": "g",
        },
    }  # fmt: skip
    assert second.body["sampling_params"] == {"max_new_tokens": None}
    assert len(second.input_ids) > 10


@pytest.mark.parametrize(
    ("request_", "code", "told"),
    [
        (Generate(), "INVALID_ARGUMENT", "input"),
        (Generate(prompt=""), "INVALID_ARGUMENT", "prompt"),
        (Generate(prompt="a\0b"), "INVALID_ARGUMENT", "prompt"),
        (Generate(tokens=router_pb2.TokenIds()), "INVALID_ARGUMENT", "tokens"),
        (Generate(tokens=router_pb2.TokenIds(ids=[512])), "INVALID_ARGUMENT", "tokens"),
        (Generate(chat=router_pb2.Messages()), "INVALID_ARGUMENT", "messages"),
        (Generate(prompt="a", sampling=router_pb2.Sampling(temperature=3)), "INVALID_ARGUMENT", "temperature"),
        (Generate(prompt="a", sampling=router_pb2.Sampling(max_tokens=5000)), "INVALID_ARGUMENT", "4096 tokens"),
        (Generate(prompt="a", model="other"), "NOT_FOUND", "other"),
    ],
)
async def test_a_wrong_request_is_refused_by_field(channel, pairing, request_, code, told):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(channel, request_)

    assert caught.value.code().name == code
    assert told in caught.value.details()
    assert pairing.requests == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(429, "RESOURCE_EXHAUSTED"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED"), (500, "INTERNAL")],
)
async def test_errors_have_the_codes_of_the_contract(channel, pairing, status, code):
    pairing.error = ApiError(status, "no", retry_after=2.0)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(channel, Generate(prompt="a"))

    assert caught.value.code().name == code
    assert dict(caught.value.trailing_metadata())["retry-after"] == "2"


async def test_an_error_in_mid_stream_ends_the_call(channel, pairing):
    pairing.parts = [ANSWER[0], b'data: {"error": {"message": "broke", "code": 503}}\n\n']

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(channel, Generate(prompt="a"))

    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "broke")
    assert pairing.left == [pairing.requests[0].rid]


async def test_a_key_is_needed(channel, pairing):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(channel, Generate(prompt="a"), key="other")

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_call_that_ends_early_leaves_the_exchange(channel, pairing, how):
    pairing.hang = True
    metadata = (("authorization", "Bearer key"),)
    call = router_pb2_grpc.RouterStub(channel).Generate(
        Generate(prompt="a"), metadata=metadata, timeout=0.3 if how == "deadline" else 20
    )
    await call.read()
    if how == "cancel":
        call.cancel()

    await wait_until(lambda: pairing.left == [pairing.requests[0].rid])


async def test_health_follows_readiness(channel, readiness):
    stub = health_pb2_grpc.HealthStub(channel)

    async def status() -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service="kllm.router.v1.Router"))).status

    assert await status() == health_pb2.HealthCheckResponse.SERVING
    readiness.ready = False
    async with asyncio.timeout(5):
        while await status() != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110  it is asked over gRPC
            await asyncio.sleep(0.02)


async def test_the_contract_can_be_asked_for(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))

    answer = await call.read()

    names = {service.name for service in answer.list_services_response.service}
    assert {"kllm.router.v1.Router", "kllm.router.v1.ServiceLevels", "grpc.health.v1.Health"} <= names
    call.cancel()


async def test_service_levels_are_told_since_the_last_report(channel, levels):
    call = router_pb2_grpc.ServiceLevelsStub(channel).WatchServiceLevels(
        router_pb2.WatchServiceLevelsRequest(interval_milliseconds=100)
    )
    assert (await call.read()).arrivals == 0
    await answers(channel, Generate(prompt="Hello"))
    times = StageTimes(queue=0.1, prefill=0.004, bind=0.2, first_token=500.0)
    usage = Usage(completion_tokens=5, cached_tokens=2)
    levels.ended(RequestSummary("r", "/generate", 200, "streaming", times=times, usage=usage))
    levels.ended(RequestSummary("s", "/generate", 429, "queue"))
    levels.ended(RequestSummary("t", "/generate", 503, "queue"))

    reports = [await call.read() for _ in range(3)]
    call.cancel()

    for name, wanted in (("arrivals", 1), ("rejected", 1), ("failed", 1), ("output_tokens", 5), ("cached_tokens", 2)):
        assert sum(getattr(report, name) for report in reports) == wanted
    stages = {stage.stage: stage for report in reports for stage in report.stages}
    # Without a transfer there was no handover.
    assert set(stages) == {
        router_pb2.STAGE_QUEUE, router_pb2.STAGE_PREFILL, router_pb2.STAGE_PREFILLED, router_pb2.STAGE_BIND,
        router_pb2.STAGE_TTFT,
    }  # fmt: skip
    assert stages[router_pb2.STAGE_PREFILLED].sum_seconds == pytest.approx(0.104)
    prompt = sum(report.prompt_tokens for report in reports)
    assert sum(report.prompt_token_squares for report in reports) == prompt**2 > 0
    assert list(stages[router_pb2.STAGE_PREFILL].counts).index(1) == LATENCY_BOUNDS_SECONDS.index(0.005)
    assert stages[router_pb2.STAGE_TTFT].counts[-1] == 1
    assert [report.sequence for report in reports] == [2, 3, 4]


def test_that_somebody_waits_is_told_at_once():
    levels = ServiceLevels("router-0", waiting=lambda: 3)

    async def work() -> list[tuple[float, int]]:
        loop, told = asyncio.get_running_loop(), []
        loop.call_later(5, levels.hurry)
        service = ServiceLevelsService(levels, clock=loop.time)
        request = router_pb2.WatchServiceLevelsRequest(interval_milliseconds=60_000)
        async for report in service.WatchServiceLevels(request, None):
            told.append((loop.time(), report.waiting))
            if len(told) == 2:
                break
        return told

    assert run_virtually(work()) == [(5, 3), (65, 3)]


def test_cumulative_and_incremental_streams_read_the_same_however_they_are_cut():
    incremental = [event("Hel", [1], 1), event("lo", [2], 2), event("!", [3], 3, "stop")]
    for parts in (ANSWER, incremental):
        whole = b"".join(parts)
        for size in (1, 7, len(whole)):
            deltas = Deltas()
            chunks = [c for at in range(0, len(whole), size) for c in deltas.feed(whole[at : at + size])]
            assert "".join(chunk.text for chunk in chunks) == "Hello!"
            assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3]
            assert (deltas.reason, deltas.completion_tokens) == ("stop", 3)
