"""The control loop in virtual time: what it decides, does and tells."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop.virtual_time import run_virtually
from loop.world import World
from plan.plan_helpers import limits

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.members import Limits, PoolLimits
from kllm_operator.substrate.exceptions import SubstrateError

QUICK = LoopSettings().with_values({"stabilisation_seconds": 20, "rebalance_seconds": 10})


def within(work, **world):
    """Run `work(world)` inside a running world, and give the world back."""

    async def whole():
        async with World(**world).running() as made:
            await work(made)
            return made

    return run_virtually(whole())


def steps(world):
    return [(each["step"], each["instance"]) for each in world.of("action")]


def test_load_on_prefill_adds_prefill_only_and_all_leave_again():
    async def wave(world):
        world.rate = 20.0
        await asyncio.sleep(60)
        world.high = world.serving()
        world.rate = 0.0
        await asyncio.sleep(200)

    world = within(wave, settings=QUICK)

    assert world.high[0] >= 3
    assert world.high[1] == 1
    assert world.serving() == (1, 1)
    assert {each["role"] for each in world.of("action", step="Start")} == {"prefill"}
    assert sorted(event["instance"] for event in world.of("outcome", step="Stop")) == sorted(
        event["instance"] for event in world.of("action", step="Drain")
    )


def test_a_tick_that_does_not_end_is_seen_by_its_age():
    async def hang():
        await asyncio.Event().wait()

    async def stuck(world):
        assert world.control.ticking_seconds == 0
        world.substrate.observe = hang
        world.control.hurry()
        await asyncio.sleep(100)
        world.age = world.control.ticking_seconds

    assert within(stuck).age == pytest.approx(100, abs=1)


def test_load_on_decode_adds_decode_only():
    async def wave(world):
        world.rate, world.output = 3.0, 2000.0
        await asyncio.sleep(60)

    world = within(wave, settings=QUICK)

    assert world.serving()[0] == 1
    assert world.serving()[1] >= 3


def test_each_decision_is_told_once_with_its_reason_and_loads():
    async def steady(world):
        await asyncio.sleep(100)
        world.rate = 12.0
        await asyncio.sleep(100)

    world = within(steady, settings=QUICK)
    plans = world.of("plan")

    ups = [each["desired"] for each in plans if each["reason"] == "ScaledUp"]
    assert [each["decode"] for each in ups] == [1]
    assert 2 <= ups[0]["prefill"] <= 3
    assert len(plans) <= 5
    scaled = next(each for each in plans if each["reason"] == "ScaledUp")
    assert scaled["before"] == {"prefill": 1, "decode": 1}
    assert scaled["loads"]["prefill"]["value"] > 1
    assert scaled["loads"]["prefill"]["terms"]["QueueAndPrefill"]["predicted"] > 1
    line = next(event.line for _, event in world.events if event.name == "plan" and "->" in event.line)
    assert line.startswith(f"plan: prefill 1 -> {ups[0]['prefill']}, decode 1 (ScaledUp): prefill 1 to ")


def test_a_load_that_crosses_1_does_not_wait_for_the_tick():
    async def surge(world):
        await asyncio.sleep(5)
        world.surge = world.loop.time()
        world.rate = 20.0
        await asyncio.sleep(10)

    world = within(surge, settings=LoopSettings(tick_seconds=300))

    assert world.of("action", step="Start")[0]["at"] - world.surge < 3


def test_nothing_starts_once_load_is_back_under_1():
    async def peak(world):
        world.rate = 40.0
        await asyncio.sleep(40)
        world.ended = world.loop.time()
        world.rate = 2.0
        await asyncio.sleep(120)

    world = within(peak, settings=QUICK)

    # The queue of the peak is worked off by then; what is under way serves or is given up.
    queue = world.of("action", step="Start")
    assert queue
    assert all(each["at"] <= world.ended + 10 for each in queue)


def test_what_is_on_its_way_is_given_up_when_it_is_not_needed_any_more():
    async def spike(world):
        world.rate = 20.0
        await asyncio.sleep(10)
        world.rate = 0.0
        await asyncio.sleep(80)

    world = within(spike, start_seconds=120.0)

    kinds = [each["step"] for each in world.of("action")]
    assert kinds[0] == "Start"
    assert kinds.count("Cancel") == kinds.count("Start")
    assert "Drain" not in kinds
    assert world.serving() == (1, 1)


def test_with_no_room_to_scale_the_dead_are_replaced_and_nothing_else_happens():
    async def overload(world):
        world.rate = 100.0
        await asyncio.sleep(30)
        assert world.of("action") == []
        world.substrate.die("chat-prefill-0")
        await asyncio.sleep(30)

    world = within(overload, bounds=limits(most=1))

    assert steps(world) == [("Stop", "chat-prefill-0"), ("Start", "chat-prefill-1")]
    assert world.of("failure")[0]["then"] == "is replaced at once"
    assert world.serving() == (1, 1)
    assert world.of("action", step="Start")[0]["at"] - world.of("failure")[0]["at"] < 0.1
    assert world.of("plan")[-1]["reason"] == "MaxReplicasReached"


def test_a_tick_that_fails_ends_nothing_and_a_later_one_makes_up_for_it():
    async def fault(world):
        def unknown(now):
            raise OSError("no forecast")

        forecast, world.forecast = world.forecast, unknown
        world.substrate.die("chat-prefill-0")
        await asyncio.sleep(30)
        assert world.of("action") == []
        world.forecast = forecast
        await asyncio.sleep(30)

    world = within(fault, bounds=limits(most=1))

    assert world.serving() == (1, 1)


def test_an_instance_that_dies_again_and_again_is_replaced_ever_later():
    async def loop(world):
        world.mortal = lambda name: "decode" in name
        await asyncio.sleep(900)

    world = within(loop, start_seconds=1.0)

    starts = [each["at"] for each in world.of("action", step="Start")]
    gaps = [after - before for before, after in pairwise(starts)]
    assert len(starts) < 25
    assert gaps[-1] == pytest.approx(62.0, abs=3.0)
    assert gaps == sorted(gaps, key=lambda gap: round(gap / 3))
    assert "failures in a row)" in world.of("failure")[-1]["then"]
    assert world.of("action", role="prefill") == []


def test_a_start_that_is_held_back_keeps_nothing_else_from_happening():
    async def loop(world):
        world.mortal = lambda name: "decode" in name
        await asyncio.sleep(120)
        world.rate = 20.0
        await asyncio.sleep(60)

    assert within(loop, start_seconds=1.0).serving()[0] >= 3


def test_the_last_failure_is_reported_until_another_one_serves():
    async def loop(world):
        world.substrate.die("chat-decode-0")
        await asyncio.sleep(30)

    world = within(loop)

    told = [each.pools[Role.DECODE] for each in world.reports]
    waiting = [each for each in told if each.last_failure is not None]
    assert waiting
    assert all(each.ready == 0 for each in waiting)
    assert any(each.warming for each in waiting), "while the next one starts, too"
    assert told[-1].last_failure is None
    assert all(each.pools[Role.PREFILL].last_failure is None for each in world.reports)


def test_an_instance_that_settles_is_forgiven():
    async def loop(world):
        for number in range(3):
            world.substrate.die(f"chat-decode-{number}")
            await asyncio.sleep(400)

    world = within(loop)

    assert {each["then"] for each in world.of("failure")} == {"is replaced at once"}


def test_an_agent_that_falls_silent_is_waited_for_and_then_given_up():
    async def silence(world):
        world.silent.add("chat-prefill-0")
        await asyncio.sleep(15)
        assert world.of("action") == []
        await asyncio.sleep(25)

    world = within(silence)

    assert "its agent was silent for 2" in world.of("failure")[0]["message"]
    assert steps(world) == [("Stop", "chat-prefill-0"), ("Start", "chat-prefill-1")]


def test_silent_routers_take_nothing_away():
    async def silence(world):
        world.rate = 20.0
        await asyncio.sleep(60)
        world.before, world.rate = world.serving(), None
        await asyncio.sleep(500)

    world = within(silence, settings=QUICK)

    assert world.serving() == world.before
    assert world.before[0] > 1


def test_what_someone_else_scales_is_advised_and_the_dead_are_replaced():
    async def overload(world):
        world.rate = 20.0
        await asyncio.sleep(60)
        world.substrate.die("chat-prefill-0")
        await asyncio.sleep(20)

    world = within(overload, advise_only=True)

    advice = world.of("plan")[-1]
    assert advice["advise_only"]
    assert advice["desired"]["prefill"] > 1
    assert steps(world) == [("Stop", "chat-prefill-0"), ("Start", "chat-prefill-1")]
    report = world.reports[-1].document()["pools"]["prefill"]
    assert (report["desired"], report["ready"]) == (1, 1)
    assert report["advised"] > 1


async def from_answers_to_prompts(world):
    """A full budget with three on decode, then work for prefill."""
    world.rate, world.output = 3.0, 2000.0
    await asyncio.sleep(90)
    assert world.serving() == (1, 3)
    world.rate, world.output = 10.0, 5.0
    world.moved = world.loop.time()
    await asyncio.sleep(90)


def test_work_that_moves_flips_an_instance_and_both_times_are_told():
    world = within(from_answers_to_prompts, settings=QUICK, bounds=limits(budget=4, most=3))

    assert world.serving()[0] == 2
    flips = world.of("action", step="Flip")
    assert len(flips) == 1
    assert [each["step"] for each in world.of("action") if each["at"] > world.moved][:2] == ["Drain", "Flip"]
    assert not [each for each in world.of("action", step="Start") if each["at"] > world.moved]
    plan = next(each for each in world.of("plan") if each["flip_to"] == "prefill")
    assert plan["reason"] == "Rebalanced"
    name = flips[0]["instance"]
    assert world.of("outcome", step="Flip", instance=name)[0]["switch_seconds"] == 1.0
    served = world.of("capacity", instance=name, how="Flip")[0]
    assert served["decision_to_serving_seconds"] == pytest.approx(served["at"] - plan["at"], abs=0.1)
    assert served["decision_to_serving_seconds"] == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("how", ["refuses", "breaks"])
def test_a_flip_that_fails_falls_back_to_stop_and_start(how):
    async def moved(world):
        getattr(world.substrate, how).update({"chat-decode-0", "chat-decode-1", "chat-decode-2"})
        await from_answers_to_prompts(world)

    world = within(moved, settings=QUICK, bounds=limits(budget=4, most=3))

    failed = world.of("outcome", step="Flip")[0]
    assert "switch roles" in failed["error"]
    after = [(each["step"], each["instance"]) for each in world.of("action") if each["at"] >= failed["at"]]
    assert after[:2] == [("Stop", failed["instance"]), ("Start", "chat-prefill-1")]
    assert world.serving()[0] == 2
    assert world.of("capacity", role="prefill")[-1]["how"] == "Start"


def test_an_instance_that_cannot_flip_is_not_asked_to():
    async def moved(world):
        world.unflippable.update({"chat-decode-0", "chat-decode-1", "chat-decode-2"})
        await from_answers_to_prompts(world)

    world = within(moved, settings=QUICK, bounds=limits(budget=4, most=3))

    assert world.of("action", step="Flip") == []
    assert world.serving()[0] == 2


def test_a_drain_that_does_not_end_is_cut_at_its_deadline():
    async def wave(world):
        world.rate = 10.0
        await asyncio.sleep(60)
        assert world.serving()[0] == 2
        world.substrate.busy.update(dict.fromkeys(("chat-prefill-0", "chat-prefill-1"), 1))
        world.rate = 0.0
        await asyncio.sleep(120)

    world = within(wave, settings=replace(QUICK, drain_seconds=30.0))

    assert "not empty after 30 s" in world.of("outcome", step="Drain")[0]["error"]
    gone = world.of("action", step="Stop")[0]
    assert gone["at"] - world.of("action", step="Drain")[0]["at"] == pytest.approx(30.0, abs=0.5)
    assert gone["message"].endswith("has not become empty in time")
    assert world.serving() == (1, 1)


def test_an_instance_that_never_gets_ready_is_replaced():
    async def stuck(world):
        world.substrate.slow.add("chat-prefill-1")
        world.substrate.die("chat-prefill-0")
        await asyncio.sleep(120)

    world = within(stuck, bounds=limits(most=1), ready_seconds=60.0)

    assert "is not ready after 60" in world.of("failure")[1]["message"]
    assert world.serving() == (1, 1)


def test_a_start_that_is_impossible_is_told_and_tried_once_a_tick():
    async def impossible(world):
        async def start(role, *, source=None):
            world.tries.append(world.loop.time())
            raise SubstrateError("there is no room")

        world.tries = []
        world.substrate.start = start
        world.substrate.die("chat-prefill-0")
        await asyncio.sleep(50)

    world = within(impossible, bounds=limits(most=1))

    assert 9 <= len(world.tries) <= 13
    assert world.of("outcome")[-1]["error"] == "there is no room"


def test_a_start_that_is_impossible_keeps_the_other_role_from_nothing():
    async def impossible(world):
        begin = world.substrate.start

        async def start(role, *, source=None):
            if role is Role.PREFILL:
                raise SubstrateError("its template is refused")
            return await begin(role)

        world.substrate.start = start
        world.substrate.die("chat-prefill-0")
        world.substrate.die("chat-decode-0")
        await asyncio.sleep(20)

    assert within(impossible).serving() == (0, 1)


def test_a_start_that_was_impossible_is_forgotten_when_it_is_not_wanted_any_more():
    async def peak(world):
        begin = world.substrate.start

        async def start(role, *, source=None):
            raise SubstrateError("the quota is used up")

        world.substrate.start = start
        world.rate = 20.0
        await asyncio.sleep(20)
        world.troubles = [world.reports[-1].pools[Role.PREFILL].trouble]
        world.substrate.start = begin
        world.rate = 0.0
        await asyncio.sleep(60)
        world.troubles.append(world.reports[-1].pools[Role.PREFILL].trouble)

    world = within(peak, settings=QUICK)

    assert world.troubles == ["the quota is used up", None]


def test_what_is_drained_and_stopped_is_no_failure():
    async def wave(world):
        world.rate = 10.0
        await asyncio.sleep(60)
        world.rate = 0.0
        await asyncio.sleep(120)

    assert within(wave, settings=QUICK).of("failure") == []


def test_the_report_counts_what_is_on_its_way():
    async def surge(world):
        world.rate = 20.0
        await asyncio.sleep(4)
        world.seen = world.reports[-1].document()

    pool = within(surge).seen["pools"]["prefill"]

    assert pool["ready"] == 1
    assert pool["warming"] >= 1
    assert pool["desired"] == pool["ready"] + pool["warming"]
    assert pool["load"]["value"] > 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.05, 12.0), min_size=1, max_size=8), st.sampled_from([12.0, 30.0]), st.booleans())
def test_a_loop_that_is_ended_anywhere_is_taken_up_by_the_next_and_no_promise_breaks(pauses, rate, dies):
    """Whoever takes over knows nothing but what the substrate shows."""

    async def takeovers():
        world = World(settings=QUICK, bounds=Limits(PoolLimits(1, 4), PoolLimits(1, 4), 5))
        async with world.running():
            pass
        engines = asyncio.create_task(world._engines())
        for role in ("prefill", "decode"):
            await world.substrate.start(next(each for each in world.substrate.made if each == role))
        world.rate = rate
        for pause in pauses:
            loop = asyncio.create_task(world.made().run())
            await asyncio.sleep(pause)
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            if dies and (serving := [n for n, e in world.substrate._all.items() if e.state is InstanceState.SERVING]):
                world.substrate.die(serving[0])
        world.rate = 0.0
        loop = asyncio.create_task(world.made().run())
        await asyncio.sleep(400)
        counts = world.serving()
        for task in (loop, engines):
            task.cancel()
        await asyncio.gather(loop, engines, return_exceptions=True)
        await world.substrate.close()
        return counts, world.broken, len(world.substrate._all)

    assert run_virtually(takeovers()) == ((1, 1), [], 2)


def test_who_comes_to_a_service_at_zero_wakes_it_before_the_next_tick_is_due():
    async def somebody_comes(world):
        await asyncio.sleep(10.3)
        world.came_at, world.rate = world.loop.time(), 0.1
        await asyncio.sleep(60)

    bounds = Limits(PoolLimits(0, 4), PoolLimits(0, 4))
    slow = LoopSettings().with_values({"tick_seconds": 30})
    world = within(somebody_comes, bounds=bounds, settings=slow)

    starts = world.of("action", step="Start")
    assert {each["role"] for each in starts} == {"prefill", "decode"}
    assert max(each["at"] for each in starts) - world.came_at <= 2.0
    assert world.serving() == (1, 1)
