"""A service at zero: whoever comes waits until the engines that it woke have started, and is answered by them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import grpc.aio
import httpx2
import pytest
from service_under_test import Service, manifest, up, wait_until_async

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.engines

ASKED = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
SLEEPY = ("zero_after_seconds=3", "window_seconds=6", "fast_seconds=3", "tick_seconds=1")


@pytest.fixture(scope="module")
def sleeper() -> Iterator[Service]:
    """A service that begins at zero and soon goes back there."""
    document = manifest(name="sleeper", uri="demo://tiny-random-llama", replicas=1)
    for role in ("prefill", "decode"):
        document["spec"][role]["minReplicas"] = 0
    with up(document, *(word for each in SLEEPY for word in ("--tune", each))) as running:
        yield running


async def asked(service: Service, **changes: object) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=service.url, timeout=120) as client:
        return await client.post("/v1/chat/completions", json=ASKED | changes)


async def generated(service: Service) -> list[router_pb2.GenerateResponse]:
    request = router_pb2.GenerateRequest(
        model="test-model", prompt="Hello", sampling=router_pb2.Sampling(max_tokens=4, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        return [answer async for answer in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=120)]


async def at_zero(service: Service) -> None:
    def why() -> str:
        return f"a service at zero: {(service.run / 'control.json').read_text()}"

    await wait_until_async(lambda: service.instances() == [], seconds=60, what=why)


async def test_whoever_comes_to_a_service_at_zero_is_answered_and_then_it_sleeps_again(sleeper: Service):
    assert sleeper.instances() == []
    whole, stream, over_grpc = await asyncio.gather(asked(sleeper), asked(sleeper, stream=True), generated(sleeper))

    assert whole.status_code == 200
    assert whole.json()["usage"]["completion_tokens"] == 4
    assert stream.status_code == 200
    assert stream.text.endswith("data: [DONE]\n\n")
    assert over_grpc[-1].finished.completion_tokens == 4

    await at_zero(sleeper)
    again = await asked(sleeper)
    assert again.status_code == 200
    assert again.json()["choices"] == whole.json()["choices"]


async def test_a_client_that_will_not_wait_so_long_is_told(sleeper: Service):
    await at_zero(sleeper)
    async with httpx2.AsyncClient(base_url=sleeper.url, timeout=120) as client:
        answer = await client.post("/v1/chat/completions", json=ASKED, headers={"x-kllm-timeout-seconds": "0.05"})
    assert answer.status_code == 504
