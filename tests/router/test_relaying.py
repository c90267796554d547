from __future__ import annotations

import asyncio
import json
import re

import pytest
from router.fake_engine import delta, stream, usage_chunk
from router.router_helpers import TOKEN, connected, router, until

from kllm_core.objectives import Binding
from kllm_router.interfaces import EventKind, StageTimes

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_stream_reaches_the_client_byte_for_byte():
    texts = ["a", 'quote " and "usage":{ in text', "ü€\n\n", "data: [DONE]", "x" * 300_000]
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream(*texts)
        client.post(stream=True, stream_options={"include_usage": True})
        answer = await client.answer()
    expected = [delta(text) for text in texts] + [usage_chunk(prompt=3, completion=len(texts))]
    sent = b"".join(b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in expected)
    assert answer.body == sent + b"data: [DONE]\n\n"
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


async def test_the_usage_chunk_is_left_out_unless_the_client_asked_for_it():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a", "b")
        client.post(stream=True)
        answer = await client.answer()
    assert [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in answer.events[:-1]] == ["a", "b"]
    assert answer.events[-1] == b"data: [DONE]"
    assert r.decode.calls[0].body["stream_options"] == {"include_usage": True}
    assert r.summaries[0].usage.completion_tokens == 2


async def test_a_plain_answer_is_relayed_whole():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        whole = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}}

        async def script(call, reply):
            reply.json(200, whole)

        r.decode.script = script
        client.post()
        answer = await client.answer()
        assert answer.json == whole
        assert "stream" not in r.decode.calls[0].body
        assert r.summaries[0].usage.completion_tokens == 7
        assert r.summaries[0].times.first_token is None


async def test_both_engines_get_the_same_request_and_no_header_of_the_client():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True, headers={"x-secret": "s", "authorization": "Bearer client", "cookie": "c"})
        await client.answer()
        prefill, decode = r.prefill.calls[0], r.decode.calls[0]
    same = ("rid", "input_ids", "bootstrap_host", "bootstrap_port", "bootstrap_room", "messages")
    assert {key: prefill.body[key] for key in same} == {key: decode.body[key] for key in same}
    assert re.fullmatch("[0-9a-f]{32}", prefill.body["rid"])
    assert 0 <= prefill.body["bootstrap_room"] < 2**62
    assert prefill.body.get("stream") is None
    assert "stream_options" not in prefill.body
    for call in (prefill, decode):
        assert call.headers["authorization"] == f"Bearer {TOKEN}"
        assert set(call.headers) == {"host", "authorization", "content-type", "content-length", "accept"}


async def test_decode_is_not_asked_before_prefill_is_done():
    async with router() as r, connected(r) as client:
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        await asyncio.sleep(0.05)
        assert not r.decode.calls
        r.prefill_done()
        assert (await client.answer()).status == 200


async def test_just_in_time_decode_is_asked_while_the_prompt_is_computed():
    async with router() as r, connected(r) as client:
        r.fleet.wish, r.fleet.bind_seconds = Binding.JUST_IN_TIME, 0.03
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.decode.calls)
        assert r.prefill.calls[0].body["rid"] == r.decode.calls[0].body["rid"]
        r.prefill_done()
        answer = await client.answer()
    assert answer.status == 200
    assert answer.headers["x-kllm-binding"] == "JustInTime"


@pytest.mark.parametrize("after", [None, 60.0])
async def test_just_in_time_a_prompt_that_is_done_sooner_is_bound_when_it_is_done(after: float | None):
    async with router() as r, connected(r) as client:
        r.fleet.wish, r.fleet.bind_seconds = Binding.JUST_IN_TIME, after
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        assert not r.decode.calls
        r.prefill_done()
        assert (await client.answer()).status == 200


async def test_just_in_time_a_prompt_that_fails_before_its_time_is_computed_elsewhere():
    async with router(prefills=2) as r, connected(r) as client:
        r.fleet.wish, r.fleet.bind_seconds = Binding.JUST_IN_TIME, 60.0
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        r.fleet.tell(EventKind.INSTANCE_LOST, of="p0", reason="Gone", message="gone")
        await until(lambda: r.prefills[1].calls)
        r.prefill_done(of="p1")
        assert (await client.answer()).status == 200


async def test_a_requeued_prompt_is_bound_at_once():
    async with router() as r, connected(r) as client:
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        r.fleet.tell(EventKind.REQUEUED)
        assert (await client.answer()).status == 200


async def test_early_binding_asks_both_at_once():
    async with router() as r, connected(r) as client:
        r.fleet.wish = Binding.EARLY
        r.decode.script = stream("a")
        client.post(stream=True)
        answer = await client.answer()
        assert answer.headers["x-kllm-binding"] == "Early"
        assert len(r.prefill.calls) == len(r.decode.calls) == 1


async def test_headers_name_the_pair_and_echo_the_request_id():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True, headers={"x-request-id": "mine-1"})
        answer = await client.answer()
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-kllm-prefill"] == "p0"
        assert answer.headers["x-kllm-decode"] == "d0"
        assert answer.headers["x-kllm-binding"] == "Late"
        assert answer.headers["x-kllm-cached-tokens"] == "2"
        assert float(answer.headers["x-kllm-first-token-seconds"]) > 0
        client.post(stream=True, headers={"x-request-id": "bad id"})
        assert re.fullmatch("[0-9a-f]{32}", (await client.answer()).headers["x-request-id"])


async def test_text_that_looks_like_the_end_of_a_stream_is_left_alone():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("data: [DONE] which is not it", "b")
        client.post(stream=True, headers={"x-kllm-timing": "1"})
        answer = await client.answer()
    assert json.loads(answer.events[0].removeprefix(b"data: "))
    assert answer.events[-2].startswith(b": kllm {")
    assert answer.events[-1] == b"data: [DONE]"


async def test_stage_times_add_up_to_the_time_to_the_first_token():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a", "b")
        client.post(stream=True, headers={"x-kllm-timing": "1"})
        answer = await client.answer()
        await until(lambda: r.summaries)
    times = r.summaries[0].times
    assert times.first_token == pytest.approx(times.queue + times.prefill + times.bind + times.transfer)
    assert times.prefill == pytest.approx(0.0001)
    assert times.per_output_token is not None
    comment = answer.events[-2]
    assert comment.startswith(b": kllm {")
    assert answer.events[-1] == b"data: [DONE]"
    told = json.loads(comment.removeprefix(b": kllm "))
    assert set(told) == set(StageTimes.__dataclass_fields__)
    assert told["first_token"] == pytest.approx(times.first_token)


async def test_chunks_that_arrive_in_pieces_are_relayed_whole():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        event = b"data: " + json.dumps(delta("abc")).encode() + b"\n\n"

        async def script(call, reply):
            raw = f"{len(event):x}\r\n".encode() + event + b"\r\n"
            reply.begin()
            for part in (raw[:1], raw[1:7], raw[7:40], raw[40:-1], raw[-1:] + raw + raw[:9], raw[9:]):
                reply.raw(part)
                await asyncio.sleep(0.01)
            reply.raw(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

        r.decode.script = script
        client.post(stream=True)
        assert (await client.head())[0] == 200
        parts = []
        while part := await client.chunk():
            parts.append(part)
    assert b"".join(parts) == event * 3 + b"data: [DONE]\n\n"
    assert all(part.endswith(b"\n\n") for part in parts)


async def test_connections_to_engines_are_kept():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        for _ in range(5):
            client.post(stream=True)
            assert (await client.answer()).status == 200
            await until(lambda: not r.client.active)
        assert r.decode.connections == 1
        assert r.prefill.connections == 1


async def test_a_connection_that_the_engine_closed_meanwhile_is_replaced():
    async with router() as r, connected(r) as client:
        r.prefill_when_asked()
        r.decode.script = stream("a")
        client.post(stream=True)
        await client.answer()
        await until(lambda: not r.client.active)

        async def close_unanswered(call, reply):
            if call.connection == 1:
                reply.cut()  # as if the engine had closed the idle connection just before
                await call.closed.wait()
            await stream("again")(call, reply)

        r.decode.script = close_unanswered
        client.post(stream=True)
        answer = await client.answer()
        assert answer.status == 200
        assert b"again" in answer.body
        assert [call.connection for call in r.decode.calls] == [1, 1, 2]


async def test_accounting_is_balanced_after_success():
    async with router() as r, connected(r) as client:
        r.decode.script = stream("a")
        client.post(stream=True)
        await until(lambda: r.prefill.calls)
        assert [key[1] for key in r.fleet.inflight] == ["p0"]
        r.prefill_done()
        await client.answer()
        await until(lambda: r.summaries)
        assert r.fleet.inflight == {}
        assert r.fleet.watches == {}


async def test_the_prefill_instances_late_answer_is_awaited_not_aborted():
    async with router() as r, connected(r) as client:
        gate = asyncio.Event()

        async def late(call, reply):
            r.prefill_done()
            await gate.wait()
            reply.json(200, {})

        r.prefill.script = late
        r.decode.script = stream("a")
        client.post(stream=True)
        await client.answer()
        assert not r.prefill.aborts
        gate.set()
        await until(lambda: not r.client.active)
        assert r.prefill.aborts == []
        assert r.decode.aborts == []


async def test_a_prefill_instance_that_never_ends_its_answer_is_aborted():
    async with router(release=0.05) as r, connected(r) as client:

        async def never(call, reply):
            r.prefill_done()
            await call.closed.wait()

        r.prefill.script = never
        r.decode.script = stream("a")
        client.post(stream=True)
        assert (await client.answer()).status == 200
        await until(lambda: r.prefill.aborts)
