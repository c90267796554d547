"""Rollouts, slots, and what people ask of single instances, as the loop carries them out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop.test_control import QUICK, from_answers_to_prompts, steps, within
from loop.test_counts import Pools
from loop.virtual_time import run_virtually
from loop.world import World
from plan.plan_helpers import D, P, limits

from kllm_core.fleet import InstanceState
from kllm_core.steps import Request, StartFrom
from kllm_operator.plan.members import Limits, PoolLimits


def revised(world, revision):
    world.substrate.revisions = dict.fromkeys((P, D), revision)
    world.substrate._changed()


def revisions(world):
    return {each.id: each.revision for each in world.substrate._all.values()}


def lows(world):
    """The least of each role that served, as the reports of all ticks tell."""
    return [min(report.pools[role].ready for report in world.reports) for role in (P, D)]


def test_a_new_revision_replaces_both_roles_in_turn_while_none_is_below_its_count():
    async def rollout(world):
        await asyncio.sleep(10)
        revised(world, "b")
        await asyncio.sleep(120)

    world = within(rollout, bounds=limits(budget=3))

    assert steps(world) == [
        ("Start", "chat-prefill-1"), ("Drain", "chat-prefill-0"), ("Stop", "chat-prefill-0"),
        ("Start", "chat-decode-1"), ("Drain", "chat-decode-0"), ("Stop", "chat-decode-0"),
    ]  # fmt: skip
    assert revisions(world) == {"chat-prefill-1": "b", "chat-decode-1": "b"}
    assert lows(world) == [1, 1]
    started, drained = world.of("capacity", instance="chat-prefill-1")[0], world.of("action", step="Drain")[0]
    assert 10 <= drained["at"] - started["at"] <= 16
    assert max(report.pools[P].outdated for report in world.reports) == 1


def test_a_bad_revision_stops_and_says_why_while_the_old_one_serves_until_it_is_mended():
    async def rollout(world):
        world.substrate.bad.add("b")
        revised(world, "b")
        await asyncio.sleep(120)
        world.stuck = world.reports[-1]
        assert steps(world) == [("Start", "chat-prefill-1"), ("Stop", "chat-prefill-1")] + [
            (kind, f"chat-prefill-{number}") for number in (2, 3) for kind in ("Start", "Stop")
        ]
        revised(world, "c")
        await asyncio.sleep(120)

    world = within(rollout, bounds=limits(budget=4))

    assert world.stuck.idle.reason == "RolloutStopped"
    assert world.stuck.pools[P].stopped == "has no such image"
    assert world.stuck.pools[P].outdated == world.stuck.pools[P].ready == 1
    assert [each["message"] for each in world.of("rollout")] == ["has no such image"]
    assert set(revisions(world).values()) == {"c"}
    assert lows(world) == [1, 1]
    assert world.reports[-1].pools[P].stopped is None


def test_who_ends_a_pause_has_a_stopped_rollout_tried_again():
    async def rollout(world):
        world.substrate.bad.add("b")
        revised(world, "b")
        await asyncio.sleep(60)
        world.control.pause(True)
        await asyncio.sleep(30)
        world.substrate.bad.clear()
        assert world.reports[-1].pools[P].stopped
        world.control.pause(False)
        await asyncio.sleep(100)

    assert set(revisions(within(rollout)).values()) == {"b"}


def test_a_budget_without_room_keeps_the_old_revision_and_says_so():
    async def rollout(world):
        revised(world, "b")
        await asyncio.sleep(60)
        world.stuck = world.reports[-1]
        world.control.change(replace(world.scaled, limits=limits(budget=2, max_unavailable=1)))
        await asyncio.sleep(100)

    world = within(rollout, bounds=limits(budget=2))

    assert (world.stuck.idle.reason, world.stuck.limited.reason) == ("BudgetExhausted", "BudgetExhausted")
    assert set(revisions(world).values()) == {"b"}


def test_slots_are_kept_ready_and_make_starts_quick():
    async def wave(world):
        await asyncio.sleep(20)
        world.idle = world.reports[-1].pools[P]
        world.rate = 12.0
        await asyncio.sleep(30)

    world = within(wave, settings=QUICK, start_seconds=8.0, assume=1.0, bounds=limits(slots=(1, 0), most=3))

    assert (world.idle.slots, world.idle.slots_wanted, world.idle.warming) == (1, 1, 0)
    prepared = world.of("action", step="Prepare")
    assert [each["role"] for each in prepared] == ["prefill"] * len(prepared)
    served = world.of("capacity", role="prefill")[0]
    assert (served["instance"], served["source"]) == ("chat-slot-0", "Slot")
    assert served["decision_to_serving_seconds"] == pytest.approx(1.0, abs=0.1)
    last = world.reports[-1].pools[P].last_start
    assert last.source in set(StartFrom)
    assert sum(each.state is InstanceState.SLOT for each in world.substrate._all.values()) == 1


def test_slots_give_way_to_instances_when_the_budget_is_needed():
    async def wave(world):
        await asyncio.sleep(20)
        assert world.reports[-1].pools[D].slots == 1
        world.rate = 20.0
        await asyncio.sleep(60)

    world = within(wave, settings=QUICK, bounds=limits(budget=4, slots=(0, 1)))

    assert world.serving() == (3, 1)
    assert len(world.substrate._all) == 4


def test_who_a_person_wants_gone_leaves_when_another_serves():
    async def asked(world):
        world.substrate.requested["chat-decode-0"] = Request.DRAIN
        await asyncio.sleep(5)
        world.early = world.reports[-1].requests
        await asyncio.sleep(60)

    world = within(asked)

    assert steps(world) == [("Start", "chat-decode-1"), ("Drain", "chat-decode-0"), ("Stop", "chat-decode-0")]
    assert world.early["chat-decode-0"].startswith("WaitingForStart: ")
    assert [(each["request"], each["accepted"]) for each in world.of("request")] == [("Drain", True)]
    assert lows(world) == [1, 1]


def test_a_flip_that_a_person_asks_for_shifts_both_counts_and_takes_that_instance():
    async def asked(world):
        world.rate, world.output = 3.0, 2000.0
        await asyncio.sleep(90)
        assert world.serving() == (1, 3)
        world.substrate.requested["chat-decode-0"] = Request.FLIP
        await asyncio.sleep(20)

    world = within(asked, settings=QUICK, bounds=limits(most=3))

    assert ("Flip", "chat-decode-0") in steps(world)
    assert world.serving()[0] == 2
    assert [each["accepted"] for each in world.of("request")] == [True]
    shifted = next(each for each in world.of("plan") if each["reason"] == "FlipRequested")
    assert shifted["desired"] == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("world_of", "why"),
    [({"bounds": limits(most=3)}, "decode would have 0"), ({"advise_only": True}, "scaling is External")],
)
def test_a_flip_that_is_not_possible_is_refused_once_and_forgotten(world_of, why):
    async def asked(world):
        world.substrate.requested["chat-decode-0"] = Request.FLIP
        await asyncio.sleep(30)

    world = within(asked, **world_of)

    assert steps(world) == []
    answer = world.of("request")
    assert len(answer) == 1
    assert (answer[0]["accepted"], why in answer[0]["message"]) == (False, True)
    assert world.substrate.requested == {}


def test_during_a_pause_what_people_ask_waits():
    async def asked(world):
        world.control.pause(True)
        world.substrate.requested.update({"chat-decode-0": Request.FLIP, "chat-prefill-0": Request.DRAIN})
        await asyncio.sleep(30)

    world = within(asked)

    assert world.of("request") == []
    assert set(world.reports[-1].requests.values()) == {"the service is paused"}
    assert len(world.substrate.requested) == 2


def test_roles_whose_pods_differ_do_not_flip():
    async def moved(world):
        world.substrate.revisions = {P: "p", D: "d"}
        await from_answers_to_prompts(world)

    world = within(moved, settings=QUICK, bounds=limits(budget=4, most=3))

    assert world.of("action", step="Flip") == []
    assert world.serving()[0] == 2


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 15.0), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=7),
    st.integers(4, 6),
)
def test_rollouts_that_are_interrupted_anywhere_end_with_the_last_revision_and_no_promise_breaks(turns, budget):
    """At each turn the leader goes, another revision is wanted, and perhaps an instance dies."""

    async def takeovers():
        bounds = Limits(PoolLimits(1, 3, slots=1), PoolLimits(1, 3), budget)
        world = World(settings=QUICK, bounds=bounds, counts=Pools())
        engines = asyncio.create_task(world._engines())
        for role in (P, D):
            await world.substrate.start(role)
        for pause, revision, dies in turns:
            loop = asyncio.create_task(world.made().run())
            world.rate = 12.0 if dies else 0.0
            revised(world, revision)
            await asyncio.sleep(pause)
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            serving = [each.id for each in world.substrate._all.values() if each.state is InstanceState.SERVING]
            if dies and len(serving) > 2:
                world.substrate.die(serving[0])
        world.rate = 0.0
        loop = asyncio.create_task(world.made().run())
        await asyncio.sleep(500)
        for task in (loop, engines):
            task.cancel()
        await asyncio.gather(loop, engines, return_exceptions=True)
        await world.substrate.close()
        return world

    world = run_virtually(takeovers())

    assert world.serving() == (1, 1)
    assert world.broken == []
    assert set(revisions(world).values()) == {turns[-1][1]}
    assert [each.state for each in world.substrate._all.values()].count(InstanceState.SLOT) == 1
