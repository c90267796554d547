"""The last instance of a role is lost: the request waits a little for the one that replaces it."""

from __future__ import annotations

import asyncio

import pytest
from router.fake_engine import hang
from router.router_helpers import router, until
from router.speaking import PATHS, at_rest, calls, engines, error_of, request, reset, said, speaks

from kllm_router.interfaces import EventKind

pytestmark = pytest.mark.asyncio(loop_scope="module")


def held_back(r, role: str):
    """Take all but the first instance of a role out of the fleet; the returned function brings them."""
    pool = getattr(r.fleet, role)
    later = pool[1:]
    del pool[1:]

    def come() -> None:
        pool.extend(later)
        r.fleet.changes.set()

    return come


async def come_when_waited_for(r, come) -> None:
    await until(lambda: r.fleet.waiting)
    come()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_goes_on_as_soon_as_a_replacement_serves(path):
    async with router() as r:
        engines(r, speaks(1))
        undisturbed = await said(r, request(path))
    async with router(decodes=2, patience_seconds=60) as r:
        engines(r, speaks(1, dies_after=3, fault=reset), speaks(2))
        come = held_back(r, "decodes")
        answer, _ = await asyncio.gather(said(r, request(path)), come_when_waited_for(r, come))
        assert answer == undisturbed
        await at_rest(r)


@pytest.mark.parametrize(("role", "striking"), [("prefills", "prefill"), ("decodes", "decode")])
async def test_a_request_that_has_lost_the_only_instance_is_served_by_its_replacement(role, striking):
    async with router(prefills=2, decodes=2, patience_seconds=60) as r:
        engines(r, speaks(1), speaks(1))
        getattr(r, striking).script = reset
        come = held_back(r, role)
        answer, _ = await asyncio.gather(said(r, request(PATHS[0])), come_when_waited_for(r, come))
        assert b"[DONE]" in answer
        await at_rest(r)


async def test_a_computed_prompt_waits_for_a_decode_instance_and_is_not_computed_again():
    async with router(decodes=2, patience_seconds=60) as r:
        engines(r, speaks(1), speaks(1))
        later = list(r.fleet.decodes)
        r.fleet.decodes.clear()

        def come() -> None:
            r.fleet.decodes.extend(later)
            r.fleet.changes.set()

        answer, _ = await asyncio.gather(said(r, request(PATHS[0])), come_when_waited_for(r, come))
        assert b"[DONE]" in answer
        assert len(calls(r.prefill)) == 1
        await at_rest(r)


async def test_what_nobody_comes_to_serve_ends_with_503_and_is_freed():
    async with router(patience_seconds=0.05) as r:
        engines(r, speaks(1))
        r.fleet.decodes.clear()
        assert (await error_of(r, request(PATHS[0]))).status == 503
        await at_rest(r)
        assert r.prefill.aborts == [calls(r.prefill)[0]["rid"]]


async def test_time_in_which_the_lost_instance_was_silent_counts_as_waited():
    async with router(patience_seconds=60) as r:
        engines(r, speaks(1))

        async def falls_silent(call, reply):
            r.fleet.tell(EventKind.INSTANCE_LOST, of="p0", message="no sign of life", unheard_seconds=60.0)
            await call.closed.wait()

        r.prefill.script = falls_silent
        assert (await asyncio.wait_for(error_of(r, request(PATHS[0])), 30)).status == 503
        await at_rest(r)


async def test_a_client_that_leaves_while_its_request_waits_frees_the_prompt():
    async with router(patience_seconds=60) as r:
        engines(r, speaks(1))
        r.fleet.decodes.clear()
        waiting = asyncio.ensure_future(said(r, request(PATHS[0])))
        await until(lambda: r.fleet.waiting)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await at_rest(r)
        assert r.prefill.aborts == [calls(r.prefill)[0]["rid"]]
        assert r.fleet.waiting == 0


async def test_a_request_that_has_reached_no_engine_is_refused_at_once():
    async with router(patience_seconds=60) as r:
        engines(r, speaks(1))
        r.prefill.script = hang
        r.fleet.prefills.clear()
        assert (await error_of(r, request(PATHS[0]))).status == 503
        assert r.fleet.waiting == 0
