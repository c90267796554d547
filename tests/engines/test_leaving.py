"""A client that leaves, at each stage: both engines are idle and hold no KV within two seconds."""

from __future__ import annotations

import asyncio

import grpc
import httpx2
import pytest
from service_under_test import Service, held, wait_idle, wait_until_async

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.engines

LONG = "word " * 2500


def body(prompt: str, tokens: int, *, stream: bool = True) -> dict[str, object]:
    return {
        "model": "test-model", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": stream,
    }  # fmt: skip


async def leave(service: Service, request: dict[str, object], when, *, url: str | None = None) -> None:
    """Post, wait until `when` is true of what is held, and cut the connection."""
    async with httpx2.AsyncClient(base_url=url or service.url, timeout=60) as client:
        posted = asyncio.create_task(client.post("/v1/completions", json=request))
        await wait_until_async(
            lambda: posted.done() or when(held(service)), seconds=20, what=lambda: f"{held(service)}"
        )
        assert not posted.done(), posted.result().text
        posted.cancel()
        await asyncio.gather(posted, return_exceptions=True)


def on(role: str, field: str):
    return lambda busy: any(role in instance and counts.get(field) for instance, counts in busy.items())


async def test_leaving_while_the_prompt_waits_or_computes_frees_both(service: Service):
    for _ in range(3):
        await leave(service, body(LONG, 400, stream=False), bool)
        wait_idle(service)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_tokens_are_generated_frees_both(service: Service, stream):
    await leave(service, body("Hello", 3000, stream=stream), on("decode", "running_requests"))

    wait_idle(service)


async def test_leaving_after_the_first_bytes_frees_both(service: Service):
    async with (
        httpx2.AsyncClient(base_url=service.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body("Hello", 3000)) as answer,
    ):
        await anext(answer.aiter_bytes())

    wait_idle(service)


async def test_many_that_leave_at_random_moments_leave_nothing_behind(service: Service):
    async def one(number: int) -> None:
        async with httpx2.AsyncClient(base_url=service.url, timeout=60) as client:
            try:
                async with asyncio.timeout(0.02 * (number % 12)):
                    await client.post("/v1/completions", json=body("word " * (number * 60 % 2500), 1500))
            except TimeoutError:
                pass

    for _ in range(3):
        await asyncio.gather(*(one(number) for number in range(14)))

    wait_idle(service)


async def test_cancelling_a_grpc_call_frees_both(service: Service):
    request = router_pb2.GenerateRequest(
        prompt="Hello", sampling=router_pb2.Sampling(max_tokens=3000, temperature=0, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(request, timeout=60)
        async for answer in call:
            if answer.WhichOneof("event") == "chunk":
                break
        call.cancel()

    wait_idle(service)


async def test_a_grpc_deadline_frees_both_and_is_told(service: Service):
    request = router_pb2.GenerateRequest(
        prompt="Hello", sampling=router_pb2.Sampling(max_tokens=3500, temperature=0, ignore_eos=True)
    )
    async with grpc.aio.insecure_channel(service.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=0.5):
                pass

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_idle(service)


async def test_leaving_while_kv_is_parked_frees_it(service: Service, parking_router: str):
    await leave(service, body(LONG, 50), on("prefill", "parked_requests"), url=parking_router)

    wait_idle(service)


async def test_parked_kv_has_a_bound_and_all_of_it_is_freed(service: Service, parking_router: str):
    limit = max(instance["load"].get("parked_limit_tokens") or 0 for instance in service.instances())
    async with httpx2.AsyncClient(base_url=parking_router, timeout=60) as client:
        posted = [
            asyncio.create_task(client.post("/v1/completions", json=body(f"{number} {LONG}", 50)))
            for number in range(12)
        ]
        await wait_until_async(
            lambda: (
                sum(counts.get("queued_requests", 0) for counts in held(service).values()) > 0
                and sum(counts.get("parked_requests", 0) for counts in held(service).values()) >= 4
            ),
            seconds=30,
            what=lambda: f"parked and waiting prompts, held: {held(service)}",
        )
        parked = {name: counts.get("parked_tokens", 0) for name, counts in held(service).items()}
        for task in posted:
            task.cancel()
        await asyncio.gather(*posted, return_exceptions=True)

    assert all(tokens <= limit for tokens in parked.values())
    wait_idle(service)
