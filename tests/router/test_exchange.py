"""The exchange as a frontend other than HTTP uses it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from router.fake_engine import answer, delta, stream
from router.router_helpers import Router, router, until

from kllm_router.interfaces import ApiError, EngineRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(*, stream: bool = True, path: str = "/generate") -> EngineRequest:
    return EngineRequest(rid="0" * 32, path=path, body={"input_ids": [1, 2]}, input_ids=(1, 2), stream=stream)


async def read_into(parts: list[bytes], r: Router) -> None:
    """Run a request and keep what came, even if it breaks."""
    async with r.pairing.open(request()) as exchange:
        async for part in exchange.chunks():
            parts.append(part)  # noqa: PERF401  a comprehension would lose what came before the break


async def freed(r: Router) -> None:
    await until(lambda: r.decode.aborts == r.prefill.aborts == ["0" * 32] or not r.client.active)
    assert r.fleet.inflight == {}


async def test_chunks_give_the_whole_stream_in_order():
    async with router() as r:
        r.prefill_when_asked()
        r.decode.script = stream("a", "b")
        async with r.pairing.open(request()) as exchange:
            body = b"".join([part async for part in exchange.chunks()])
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.index(b'"a"') < body.index(b'"b"')
        assert r.decode.calls[0].body["stream"] is True
        assert "stream_options" not in r.decode.calls[0].body
        assert r.summaries[0].status == 200


async def test_a_broken_stream_raises_after_its_last_chunk():
    async def script(call, reply):
        reply.begin()
        reply.event(delta("a"))
        await asyncio.sleep(0.02)
        reply.cut()
        await call.closed.wait()

    async with router() as r:
        r.prefill_when_asked()
        r.decode.script = script
        parts: list[bytes] = []
        with pytest.raises(ApiError, match="d0"):
            await read_into(parts, r)
        assert len(parts) == 1
        assert r.summaries[0].status == 503
        await freed(r)


async def test_a_consumer_that_stops_frees_both_engines():
    async def script(call, reply):
        reply.begin()
        while True:
            reply.event(delta("a"))
            await asyncio.sleep(0.002)

    async with router() as r:
        r.prefill_when_asked()
        r.decode.script = script
        async with r.pairing.open(request()) as exchange:
            async for _ in exchange.chunks():
                break
        await until(lambda: r.decode.aborts == ["0" * 32])
        await freed(r)


async def test_a_consumer_that_is_slow_slows_the_engine():
    sent = 0

    async def script(call, reply):
        nonlocal sent
        reply.begin()
        for _ in range(2000):
            await reply.writable.wait()
            reply.chunk(b"data: " + b"x" * 16_384 + b"\n\n")
            sent += 1
            await asyncio.sleep(0)
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    async with router() as r:
        r.prefill_when_asked()
        r.decode.script = script
        async with r.pairing.open(request()) as exchange:
            parts = exchange.chunks()
            received = len(await anext(parts))
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 1900
            async for part in parts:
                received += len(part)
        assert received == 2000 * (16_384 + 8) + len(b"data: [DONE]\n\n")


async def test_a_plain_answer_is_there_at_once():
    async with router() as r:
        r.prefill_when_asked()

        async def script(call, reply):
            reply.json(200, {"meta_info": {"completion_tokens": 5, "prompt_tokens": 2}})

        r.decode.script = script
        async with r.pairing.open(request(stream=False)) as exchange:
            assert b"completion_tokens" in exchange.body
            assert exchange.usage.completion_tokens == 5
            assert ("x-kllm-decode", "d0") in exchange.headers


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_that_has_ended_leaves_nothing_for_the_garbage_collector(streamed):
    async with router() as r:
        r.prefill_when_asked()
        r.decode.script = stream("a") if streamed else answer(200, {"text": "a"})
        gc.collect()
        gc.disable()
        try:
            async with r.pairing.open(request(stream=streamed)) as exchange:
                if streamed:
                    assert [part async for part in exchange.chunks()]
                kept = [weakref.ref(each) for each in (exchange, exchange.prefill, exchange.decode)]
            del exchange
            await until(lambda: not r.client.active)
            await until(lambda: [each() for each in kept] == [None, None, None])
        finally:
            gc.enable()
