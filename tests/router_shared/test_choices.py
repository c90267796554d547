"""What other routers have on instances counts in the choices of this one."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from router_brain.brain_helpers import wait_until
from router_brain.scripted_agent import TOKEN, ScriptedAgent

from kllm_core.objectives import Role
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import ApiError, EngineRequest
from kllm_router.proxy.fleet_view import AgentFleetView
from kllm_router.scheduling.quota import NOTHING
from kllm_router.scheduling.share import NO_SHARE, Share

PROMPT = list(range(40))


class Others:
    """What they have, set by the test."""

    def __init__(self):
        self.shares: dict[str, Share] = {}

    def of(self, instance_id, now):
        assert abs(now - time.monotonic()) < 5
        return self.shares.get(instance_id, NO_SHARE)

    def spent(self, key, now):
        return NOTHING

    def status(self):
        return {"up": True}


@pytest.fixture
async def agents():
    made = [
        await ScriptedAgent("p0").start(), await ScriptedAgent("p1").start(),
        await ScriptedAgent("d0", Role.DECODE).start(), await ScriptedAgent("d1", Role.DECODE).start(),
    ]  # fmt: skip
    yield made
    await asyncio.gather(*(agent.stop() for agent in made))


@pytest.fixture
async def others():
    return Others()


@pytest.fixture
async def view(agents, others):
    made = AgentFleetView(token=TOKEN, shared=others)
    made.book.apply([DiscoveredInstance(agent.id, agent.role, agent.address) for agent in agents])
    await wait_until(lambda: made.ready and all(record.taken_at is not None for record in made.book.ordered))
    yield made
    await made.book.close()


NUMBERS = itertools.count()


def request():
    """A request whose prompt begins as none before it."""
    number = next(NUMBERS)
    return EngineRequest(f"{number:032x}", "/v1/completions", {}, [number, *PROMPT])


def prefills(view):
    return {view.choose_prefill(request()).instance_id for _ in range(4)}


def decodes(view):
    prefill = view.choose_prefill(request())
    return {view.choose_decode(request(), prefill).instance_id for _ in range(4)}


async def test_without_others_equals_take_turns(view):
    assert prefills(view) == {"p0", "p1"}
    assert decodes(view) == {"d0", "d1"}


async def test_prompts_that_others_sent_count_as_queue(view, others):
    others.shares = {"p0": Share(1, 1, 4000)}
    assert prefills(view) == {"p1"}

    others.shares = {}
    assert prefills(view) == {"p0", "p1"}


async def test_requests_that_others_sent_count_as_batch_and_as_kv(view, others):
    others.shares = {"d1": Share(20, 20, 0)}
    assert decodes(view) == {"d0"}
    others.shares = {"d0": Share(1, 1, 200_000)}
    assert decodes(view) == {"d1"}


async def test_of_equals_the_one_with_fewer_requests_of_all_routers_is_taken(view, others):
    others.shares = {"p0": Share(3, 0, 0), "d1": Share(1, 0, 0)}

    assert prefills(view) == {"p1"}
    assert decodes(view) == {"d0"}


async def test_what_others_sent_adds_to_what_was_sent_here(view, others):
    prefill = view.book.records["p0"].endpoint
    view.started("a" * 32, prefill, 1000)
    own = view.book.records["p0"].share
    others.shares = {"p0": Share(2, 1, 500)}

    candidate = view.book.records["p0"].prefill_candidate(time.monotonic(), others=others.of("p0", time.monotonic()))

    assert own.in_flight == 1
    assert candidate.in_flight == 3
    assert candidate.unreported_tokens == own.unreported_tokens + 500


async def test_requests_that_others_let_wait_keep_new_ones_out(view, others):
    others.shares = {"d0": Share(300, 300, 0), "d1": Share(300, 300, 0)}

    with pytest.raises(ApiError) as refused:
        view.choose_prefill(request())
    assert refused.value.status == 429


async def test_only_what_there_is_something_of_is_shared(view):
    assert view.shares() == {}
    prefill = view.book.records["p1"].endpoint
    view.started("a" * 32, prefill, 1000)

    assert list(view.shares()) == ["p1"]
    assert view.shares()["p1"].in_flight == 1
    view.finished("a" * 32, prefill)
    assert view.shares() == {}


async def test_people_are_told_of_sharing_only_where_there_is_some(view):
    assert view.status()["shared"] == {"up": True}
    assert "shared" not in AgentFleetView(token=TOKEN).status()
