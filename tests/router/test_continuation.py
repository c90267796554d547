"""A stream whose decode instance is lost goes on elsewhere, and the client does not notice."""

from __future__ import annotations

import asyncio

import pytest
from router.router_helpers import router, until
from router.speaking import (
    PATHS,
    PIECE,
    PROMPT,
    TEXT,
    abort_event,
    at_rest,
    calls,
    early_end,
    ending,
    engines,
    error_of,
    failed_in,
    failure_event,
    request,
    reset,
    reset_within_an_event,
    said,
    silence,
    speaks,
)

from kllm_router.interfaces import EventKind
from kllm_router.scheduling.budget import BudgetSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNKS = -(-len(TEXT) // PIECE)
FAULTS = {
    "reset": reset,
    "reset_within_an_event": reset_within_an_event,
    "failure_event": failure_event,
    "abort_event": abort_event,
    "early_end": early_end,
}


def counted(r, outcome: str, cause: str = "reset") -> float | None:
    labels = {"cause": cause, "outcome": outcome}
    return r.metrics.registry.get_sample_value("kllm_router_continuations_total", labels)


async def undisturbed(path: str) -> bytes:
    async with router() as r:
        engines(r, speaks(1))
        return await said(r, request(path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [1, 2, CHUNKS - 1])
@pytest.mark.parametrize("fault", list(FAULTS))
async def test_a_stream_that_broke_is_the_same_as_one_that_did_not(path, after, fault):
    expected = await undisturbed(path)
    async with router(prefills=2, decodes=2) as r:
        engines(r, speaks(1, dies_after=after, fault=FAULTS[fault]), speaks(2))
        assert await said(r, request(path)) == expected
        await at_rest(r)
        resumed = calls(r.decodes[1])[0]
        assert resumed["kllm_resume_output_ids"] == [ord(c) for c in TEXT[: after * PIECE]]
        assert calls(r.prefill)[1]["kllm_resume_output_ids"] == resumed["kllm_resume_output_ids"]
        assert resumed["rid"] != calls(r.decode)[0]["rid"]
        assert (r.summaries[0].status, r.summaries[0].attempts, r.summaries[0].continuations) == (200, 2, 1)
        assert r.summaries[0].usage.completion_tokens == len(TEXT)
        assert failed_in(r) == {"d0"}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_goes_on_when_the_agent_says_that_the_instance_is_gone(path):
    expected = await undisturbed(path)
    async with router(prefills=2, decodes=2) as r:

        async def hung(call, reply):
            r.fleet.tell(EventKind.INSTANCE_LOST, of="d0", message="hung")
            await call.closed.wait()

        engines(r, speaks(1, dies_after=3, fault=hung), speaks(2))
        assert await said(r, request(path)) == expected
        await at_rest(r)
        assert counted(r, "served", "gone") == 1


async def test_a_stream_goes_on_when_the_instance_shows_no_work_for_it():
    expected = await undisturbed(PATHS[0])
    async with router(prefills=2, decodes=2, silence=0.05) as r:
        r.fleet.forgetful.add("d0")
        engines(r, speaks(1, dies_after=3, fault=silence), speaks(2))
        assert await said(r, request(PATHS[0])) == expected
        assert counted(r, "served", "silent") == 1


async def test_a_stream_goes_on_twice_and_not_three_times():
    expected = await undisturbed(PATHS[0])
    dies = [speaks(number, dies_after=2, fault=reset) for number in range(1, 4)]
    async with router(decodes=3) as r:
        engines(r, *dies[:2], speaks(9))
        assert await said(r, request(PATHS[0])) == expected
        assert counted(r, "served") == 2
    async with router(decodes=4) as r:
        engines(r, *dies, speaks(9))
        assert (await error_of(r, request(PATHS[0]))).status == 503
        assert counted(r, "exhausted") == 1
        assert calls(r.decodes[3]) == []
        await at_rest(r)


async def test_a_continuation_survives_the_loss_of_its_own_instances():
    expected = await undisturbed(PATHS[1])
    async with router(prefills=2, decodes=3) as r:
        engines(r, speaks(1, dies_after=2, fault=reset), reset, speaks(3))
        healthy = r.prefill.script

        async def dies_at_the_second(call, reply):
            await (healthy if len(r.prefill.calls) == 1 else reset)(call, reply)

        r.prefill.script = dies_at_the_second
        assert await said(r, request(PATHS[1])) == expected
        await at_rest(r)
        assert failed_in(r) == {"p0", "d0", "d1"}
        rids = [body["rid"] for engine in (*r.prefills, *r.decodes) for body in calls(engine)]
        assert len(set(rids)) == 4


async def test_without_another_instance_the_stream_ends_with_an_error():
    async with router() as r:
        engines(r, speaks(1, dies_after=2, fault=reset))
        error = await error_of(r, request(PATHS[0]))
        assert (error.status, error.code) == (503, "engine_unavailable")
        assert counted(r, "no_instance") == 1
        assert len(calls(r.prefill)) == 1
        await at_rest(r)


async def test_text_without_its_ids_cannot_be_gone_on_from():
    async with router(decodes=2) as r:

        async def unannounced(call, reply):
            reply.chunk(b'data: {"choices":[{"index":0,"text":"??","finish_reason":null}]}\n\n')
            await asyncio.sleep(0.02)
            reply.cut()
            await call.closed.wait()

        engines(r, speaks(1, dies_after=2, fault=unannounced), speaks(2))
        assert (await error_of(r, request(PATHS[1]))).status == 503
        assert counted(r, "not_resumable") == 1
        assert calls(r.decodes[1]) == []


async def test_a_stream_that_was_told_its_end_is_completed_without_an_engine():
    async with router(decodes=2) as r:

        async def finishes_and_dies(call, reply):
            reply.begin()
            reply.chunk(b': kllm-ids 1,2,3,4\n\ndata: {"id":"x","choices":[{"index":0,"text":"abcd"}]}\n\n')
            told = ending(call, 1, TEXT)
            reply.chunk(told[: told.index(b"\n\n") + 2])
            await asyncio.sleep(0.02)
            reply.cut()
            await call.closed.wait()

        engines(r, finishes_and_dies, speaks(2))
        body = await said(r, request(PATHS[1]))
        assert body.count(b"data: [DONE]") == 1
        assert b'"completion_tokens":4' in body
        assert b'"prompt_tokens":%d' % len(PROMPT) in body
        assert calls(r.decodes[1]) == []
        assert r.summaries[0].status == 200


@pytest.mark.parametrize("how", ["switched_off", "echo"])
async def test_streams_that_cannot_go_on_are_not_asked_for_ids(how):
    async with router(decodes=2, continue_streams=how != "switched_off") as r:

        async def plain(call, reply):
            assert "kllm_token_ids" not in call.body
            reply.begin()
            reply.chunk(b'data: {"choices":[]}\n\n')
            await asyncio.sleep(0.02)
            reply.cut()
            await call.closed.wait()

        engines(r, plain, plain)
        asked = request(PATHS[1], **({"echo": True} if how == "echo" else {}))
        assert (await error_of(r, asked)).status == 503
        assert calls(r.decodes[1]) == []


async def test_the_budget_of_all_requests_bounds_continuations():
    async with router(decodes=2, budget=BudgetSettings(share=0.0, floor=1)) as r:
        engines(r, speaks(1, dies_after=1, fault=reset), speaks(2))
        await said(r, request(PATHS[0]))
        assert (await error_of(r, request(PATHS[0]))).status == 503
        assert counted(r, "over_budget") == 1


async def test_a_client_that_leaves_while_its_stream_is_being_continued_frees_everything():
    async with router(decodes=2) as r:
        engines(r, speaks(1, dies_after=1, fault=reset), silence)
        reading = asyncio.ensure_future(said(r, request(PATHS[0])))
        await until(lambda: calls(r.decodes[1]))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: r.decodes[1].aborts == [calls(r.decodes[1])[0]["rid"]])
        await at_rest(r)
        assert r.summaries[0].status == 499
