"""Instances are lost before the first byte: the request goes to others, and an answer comes whenever one could."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from router.fake_engine import answer, hang
from router.router_helpers import connected, router, until
from router.speaking import (
    PATHS,
    TEXT,
    at_rest,
    calls,
    engines,
    error_of,
    failed_in,
    request,
    reset,
    said,
    speaks,
)

from kllm_core.objectives import Binding
from kllm_router.interfaces import EventKind
from kllm_router.scheduling.budget import BudgetSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOW = ["killed", "reset", "agent", "silent", "engine_error"]


async def strike(r, engine, how: str, call, reply) -> None:
    """Let a fault happen to an engine that has just got a call."""
    if how == "killed":
        asyncio.get_running_loop().create_task(engine.stop())
    elif how == "reset":
        reply.cut()
    elif how == "agent":
        r.fleet.tell(EventKind.INSTANCE_LOST, of=engine.instance_id, message="no sign of life")
    elif how == "silent":
        r.fleet.forgetful.add(engine.instance_id)
    else:
        reply.json(500, {"object": "error", "message": "out of memory", "code": 500})
        return
    await call.closed.wait()


def struck(r, engine, how: str, *, parks_first: bool = False):
    """A script that suffers a fault when it is called."""

    async def script(call, reply):
        if parks_first:
            r.fleet.tell(EventKind.PREFILL_DONE, rid=call.body["rid"], prompt_tokens=3)
            await until(lambda: any(engine.calls for engine in r.decodes))
        await strike(r, engine, how, call, reply)

    return script


def whole(body: bytes) -> bool:
    """Whether an answer holds all of the text, streamed or not."""
    if body.startswith(b"{"):
        return json.loads(body)["text"] == TEXT
    return b'"completion_tokens":%d' % len(TEXT) in body and body.endswith(b"data: [DONE]\n\n")


def counted(r, role: str, outcome: str) -> float:
    samples = [s for m in r.metrics.registry.collect() for s in m.samples if s.name == "kllm_router_retries_total"]
    return sum(s.value for s in samples if (s.labels["role"], s.labels["outcome"]) == (role, outcome))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", HOW)
async def test_a_prefill_instance_lost_before_the_kv_is_complete_is_replaced(how, stream):
    async with router(prefills=2, silence=0.05) as r:
        engines(r, speaks(1))
        r.prefill.script = struck(r, r.prefill, how)
        body = await said(r, request(PATHS[0], stream=stream))
        assert whole(body)
        await at_rest(r)
        assert failed_in(r) == {"p0"}
        assert counted(r, "prefill", "served") == 1
        assert r.summaries[0].attempts == 2
        assert request(PATHS[0]).rid.encode() in body


async def test_a_prefill_instance_that_cannot_be_reached_is_replaced():
    async with router(prefills=2) as r:
        engines(r, speaks(1))
        await r.prefill.stop()
        assert whole(await said(r, request(PATHS[0])))
        await at_rest(r)
        assert failed_in(r) == {"p0"}


@pytest.mark.parametrize("how", HOW)
async def test_the_only_prefill_instance_lost_gives_an_error_soon(how):
    async with router(silence=0.05) as r:
        engines(r, speaks(1))
        r.prefill.script = struck(r, r.prefill, how)
        began = time.monotonic()
        error = await error_of(r, request(PATHS[0]))
        assert time.monotonic() - began < 2
        assert error.status == (502 if how == "engine_error" else 503)
        await at_rest(r)
        assert counted(r, "prefill", "no_instance") == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", HOW)
async def test_a_decode_instance_lost_after_it_was_asked_is_replaced_with_a_new_room_on_the_same_p(how, stream):
    async with router(prefills=2, decodes=2, silence=0.05) as r:
        engines(r, None, speaks(2))
        r.decode.script = struck(r, r.decode, how)
        assert whole(await said(r, request(PATHS[1], stream=stream)))
        await at_rest(r)
        first, second = calls(r.prefill)
        assert calls(r.prefills[1]) == []
        assert first["bootstrap_room"] != second["bootstrap_room"]
        assert first["rid"] != second["rid"]
        assert failed_in(r) == {"d0"}
        assert set(r.prefill.aborts) <= {first["rid"]}


@pytest.mark.parametrize("how", HOW)
async def test_a_decode_instance_lost_after_the_transfer_is_replaced(how):
    async with router(decodes=2, silence=0.05) as r:
        engines(r, None, speaks(2))

        async def takes_the_kv(call, reply):
            r.fleet.tell(EventKind.RELEASED, rid=call.body["rid"], reason="Transferred")
            await asyncio.sleep(0.01)
            await strike(r, r.decode, how, call, reply)

        r.decode.script = takes_the_kv
        assert whole(await said(r, request(PATHS[2])))
        await at_rest(r)
        assert len(calls(r.prefill)) == 2


@pytest.mark.parametrize("how", ["killed", "agent", "silent"])
async def test_a_prefill_instance_lost_after_its_kv_has_left_does_not_matter(how):
    async with router(silence=0.05) as r:
        engines(r, None)

        async def parks_and_waits(call, reply):
            r.fleet.tell(EventKind.PREFILL_DONE, rid=call.body["rid"], prompt_tokens=3)
            await call.closed.wait()

        r.prefill.script = parks_and_waits

        async def begins_and_waits(call, reply):
            r.fleet.tell(EventKind.RELEASED, rid=call.body["rid"], reason="Transferred")
            lost = asyncio.get_running_loop().create_task(strike(r, r.prefill, how, r.prefill.calls[0], reply))
            await asyncio.sleep(0.1)
            lost.cancel()
            await speaks(1)(call, reply)

        r.decode.script = begins_and_waits
        assert whole(await said(r, request(PATHS[0])))
        assert r.summaries[0].attempts == 1


async def test_a_decode_instance_that_was_never_reached_leaves_the_parked_kv_to_another():
    async with router(prefills=2, decodes=2) as r:
        engines(r, None, speaks(2))
        await r.decode.stop()
        assert whole(await said(r, request(PATHS[0])))
        await at_rest(r)
        assert len(calls(r.prefill)) == 1
        assert calls(r.decodes[1])[0]["bootstrap_room"] == calls(r.prefill)[0]["bootstrap_room"]
        assert r.prefill.aborts == []
        assert counted(r, "decode", "served") == 1


@pytest.mark.parametrize("role", ["prefills", "decodes"])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_kept_connection_that_breaks_never_sends_the_same_id_to_an_engine_twice(role, others):
    async with router(**{role: 1 + others}) as r:
        engines(r, *[speaks(1)] * len(r.decodes))
        await said(r, request(PATHS[0]))
        await until(lambda: not r.client.active)
        engine = getattr(r, role)[0]
        healthy, connection = engine.script, engine.connections

        async def resets_what_was_kept(call, reply):
            await (reset if call.connection == connection else healthy)(call, reply)

        engine.script = resets_what_was_kept
        assert whole(await said(r, request(PATHS[1])))
        await at_rest(r)
        for each in (*r.prefills, *r.decodes):
            rids = [body["rid"] for body in calls(each)]
            assert len(set(rids)) == len(rids)
        assert len(calls(engine)) == 3 - others
        assert failed_in(r) == set()


async def test_a_room_is_not_used_again_when_the_lost_instance_may_have_entered_it():
    async with router(decodes=2) as r:
        engines(r, speaks(1), speaks(2))
        await said(r, request(PATHS[0]))
        await until(lambda: not r.client.active)

        async def dies(call, reply):
            asyncio.get_running_loop().create_task(r.decode.stop())  # on a connection that was kept
            await call.closed.wait()

        r.decode.script = dies
        assert whole(await said(r, request(PATHS[1])))
        rooms = [body["bootstrap_room"] for body in calls(r.prefill)[1:]]
        assert len(set(rooms)) == 2
        assert calls(r.decodes[1])[0]["bootstrap_room"] == rooms[1]


@pytest.mark.parametrize("how", HOW)
async def test_the_only_decode_instance_lost_gives_an_error_and_no_second_prefill(how):
    async with router(silence=0.05) as r:
        engines(r, None)
        r.decode.script = struck(r, r.decode, how)
        error = await error_of(r, request(PATHS[0]))
        assert error.status == (502 if how == "engine_error" else 503)
        await at_rest(r)
        assert len(calls(r.prefill)) == 1


@pytest.mark.parametrize("how", ["reset", "agent", "engine_error"])
async def test_a_prefill_instance_lost_during_the_handshake_is_replaced(how):
    async with router(prefills=2, prefill_lost=0.02) as r:
        engines(r, None)
        r.prefill.script = struck(r, r.prefill, how, parks_first=True)

        async def waits_for_the_second(call, reply):
            await (hang if len(calls(r.decode)) == 1 else speaks(2))(call, reply)

        r.decode.script = waits_for_the_second
        assert whole(await said(r, request(PATHS[0])))
        await at_rest(r)
        old, new = calls(r.decode)
        assert r.decode.aborts == [old["rid"]]
        assert old["rid"] != new["rid"]


async def test_a_failed_transfer_blames_nobody_and_is_tried_with_others_first():
    async with router(prefills=2, decodes=2) as r:
        engines(r, None, speaks(2))
        r.decode.script = answer(500, {"message": "Decode transfer failed: Lost connection with prefill instance"})
        assert whole(await said(r, request(PATHS[0])))
        assert failed_in(r) == set()
        assert calls(r.prefills[1])
        assert calls(r.decodes[1])
    async with router() as r:
        engines(r, None)

        async def fails_once(call, reply):
            failing = answer(500, {"message": "Decode transfer failed"})
            await (failing if len(calls(r.decode)) == 1 else speaks(1))(call, reply)

        r.decode.script = fails_once
        assert whole(await said(r, request(PATHS[0])))


async def test_what_the_client_did_wrong_is_not_tried_again():
    async with router(prefills=2) as r:
        engines(r, speaks(1))
        r.prefill.script = answer(400, {"message": "too long"})
        assert (await error_of(r, request(PATHS[0]))).status == 400
        assert calls(r.prefills[1]) == []
        assert failed_in(r) == set()


async def test_prefill_is_tried_again_twice_at_most():
    async with router(prefills=4) as r:
        engines(r, speaks(1))
        for engine in r.prefills[:3]:
            engine.script = reset
        assert (await error_of(r, request(PATHS[0]))).status == 503
        assert calls(r.prefills[3]) == []
        assert counted(r, "prefill", "exhausted") == 1
        assert counted(r, "prefill", "failed_again") == 2
        await at_rest(r)


async def test_the_budget_of_all_requests_bounds_retries():
    async with router(prefills=2, budget=BudgetSettings(share=0.0, floor=1)) as r:
        engines(r, speaks(1))
        r.prefill.script = reset
        assert whole(await said(r, request(PATHS[0])))
        assert (await error_of(r, request(PATHS[0]))).status == 503
        assert counted(r, "prefill", "over_budget") == 1


async def test_early_binding_recovers_too():
    async with router(prefills=2, decodes=2) as r:
        r.fleet.wish = Binding.EARLY
        engines(r, reset, speaks(2))
        assert whole(await said(r, request(PATHS[0])))
        await at_rest(r)
        assert len(calls(r.prefill)) == 2


async def test_a_late_decode_instance_is_replaced():
    async with router(decodes=2, first_token=0.05) as r:
        engines(r, hang, speaks(2))
        assert whole(await said(r, request(PATHS[0])))
        await at_rest(r)
        assert r.decode.aborts == [calls(r.decode)[0]["rid"]]


@pytest.mark.parametrize(("asked", "whose"), [(0.05, "client"), (None, "router")])
async def test_a_deadline_holds_across_retries_and_says_whose_it_is(asked, whose):
    async with router(prefills=2, total=0.1) as r:
        engines(r, speaks(1))
        r.prefill.script = reset
        r.prefills[1].script = hang
        error = await error_of(r, request(PATHS[0]), deadline_seconds=asked)
        assert (error.status, error.code) == (504, "timeout")
        assert whose in error.message
        await at_rest(r)
        assert r.prefills[1].aborts == [calls(r.prefills[1])[0]["rid"]]


@pytest.mark.parametrize(("given", "status"), [("0.05", 504), ("nan", 400), ("-1", 400), ("soon", 400), ("60", 200)])
async def test_a_client_may_set_a_deadline(given, status):
    async with router() as r, connected(r) as client:
        engines(r, speaks(1))
        if status == 504:
            r.prefill.script = hang
        client.post(headers={"x-kllm-timeout-seconds": given})
        assert (await client.answer()).status == status


async def test_headers_tell_of_attempts():
    async with router(prefills=2) as r, connected(r) as client:
        engines(r, speaks(1))
        r.prefill.script = reset
        client.post(stream=True)
        response = await client.answer()
        assert response.headers["x-kllm-attempts"] == "2"
        assert response.headers["x-kllm-prefill"] == "p1"
        assert response.events[-1] == b"data: [DONE]"
