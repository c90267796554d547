"""Desired counts that are kept outside the loop: written by it, or by others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from loop.test_control import QUICK, steps, within
from loop.virtual_time import run_virtually
from loop.world import World
from plan.plan_helpers import D, P, limits
from substrate.polling import polled

from kllm_operator.loop.counts import CountsError


class Pools:
    """Counts as two pools hold them; they can be out of reach."""

    def __init__(self, prefill=1, decode=1):
        self.held = {P: prefill, D: decode}
        self.written, self.broken = [], False

    def read(self):
        return dict(self.held)

    async def write(self, desired):
        if self.broken:
            raise CountsError("the API server does not answer")
        self.written.append(desired)
        self.held = {role: desired.of(role) for role in (P, D)}


def test_both_counts_are_written_in_one_decision_with_its_reason_and_only_when_they_change():
    async def wave(world):
        await asyncio.sleep(30)
        assert world.counts.written == []
        world.rate = 20.0
        await asyncio.sleep(60)

    world = within(wave, settings=QUICK, counts=Pools())

    assert world.counts.held == {P: world.serving()[0], D: 1}
    assert world.serving()[0] > 1
    written = [(each.prefill, each.decode) for each in world.counts.written]
    assert {each.reason for each in world.counts.written} <= {"ScaledUp", "ScaledDown"}
    assert all(after != before for before, after in pairwise([(1, 1), *written]))


def test_counts_that_cannot_be_written_are_not_acted_upon_until_they_can():
    async def wave(world):
        world.counts.broken = True
        world.rate = 20.0
        await asyncio.sleep(40)
        assert steps(world) == []
        report = world.reports[-1]
        assert (report.desired.prefill, report.desired.reason) == (1, "CountsNotWritten")
        world.counts.broken = False
        await asyncio.sleep(40)

    world = within(wave, settings=QUICK, counts=Pools())

    assert world.serving()[0] > 1
    assert [each["message"] for each in world.of("counts")] == ["the API server does not answer"]


def test_a_new_leader_starts_from_the_counts_that_stand_and_not_from_what_it_sees():
    """Of three that are asked for two have died with the old leader, and no router has told anything yet."""

    async def takeover():
        world = World(settings=QUICK, counts=Pools(prefill=3, decode=1))
        world.rate = None
        async with world.running():
            await asyncio.sleep(200)
        return world

    world = run_virtually(takeover())

    assert world.serving() == (3, 1)
    assert world.counts.held == {P: 3, D: 1}
    assert world.counts.written == []


def test_what_others_write_is_carried_out_and_the_plan_is_advice():
    async def scaled(world):
        world.rate = 20.0
        world.counts.held = {P: 1, D: 3}
        world.control.hurry()
        await asyncio.sleep(40)
        assert world.serving() == (1, 3)
        world.counts.held = {P: 1, D: 2}
        await asyncio.sleep(40)

    world = within(scaled, advise_only=True, counts=Pools())

    assert world.serving() == (1, 2)
    assert world.counts.written == []
    report = world.reports[-1]
    assert (report.desired.decode, report.desired.reason) == (2, "External")
    assert report.advised.prefill > 1
    assert report.limited is None


def test_counts_of_others_beyond_the_bounds_are_clamped_and_told():
    async def scaled(world):
        world.counts.held = {P: 9, D: 0}
        await asyncio.sleep(60)

    world = within(scaled, advise_only=True, counts=Pools(), bounds=limits(most=4, budget=4))

    assert world.serving() == (3, 1)
    told = world.reports[-1].limited
    assert told.reason == "ScalingLimited"
    assert "prefill is asked for 9 and gets 3: gpuBudget is 4" in told.message
    assert "decode is asked for 0 and gets 1: minReplicas is 1" in told.message


def test_the_planner_goes_on_from_the_counts_of_others_when_it_may_write_again():
    async def scaled(world):
        world.counts.held = {P: 3, D: 3}
        await asyncio.sleep(30)
        world.rate = None
        world.control.change(replace(world.scaled, advise_only=False))
        await asyncio.sleep(100)

    world = within(scaled, advise_only=True, counts=Pools(), settings=QUICK)

    assert world.serving() == (3, 3)
    assert world.counts.written == []


def test_limits_of_a_loop_that_runs_can_be_changed():
    async def changed(world):
        world.rate = 20.0
        await asyncio.sleep(60)
        world.high = world.serving()
        world.control.change(replace(world.scaled, limits=limits(most=2)))
        await asyncio.sleep(60)

    world = within(changed, settings=QUICK, bounds=limits(most=8), counts=Pools())

    assert world.high[0] > 2
    assert world.serving() == (2, 1)
    assert world.counts.held == {P: 2, D: 1}
    assert world.of("capacity")[-1]["decision_to_serving_seconds"] is not None


def test_while_paused_nothing_is_done_and_all_is_told():
    async def paused(world):
        world.control.pause(True)
        world.rate = 20.0
        world.substrate.die("chat-decode-0")
        await asyncio.sleep(60)
        assert steps(world) == []
        assert world.counts.written == []
        report = world.reports[-1]
        assert (report.paused, report.idle.reason, report.desired.prefill) == (True, "Paused", 1)
        assert report.advised.prefill > 1
        assert report.pools[D].failed == 1
        assert len(world.of("failure")) == 1
        world.control.pause(False)
        await asyncio.sleep(60)

    world = within(paused, settings=QUICK, counts=Pools())

    assert world.serving()[0] > 1
    assert world.serving()[1] == 1
    assert not world.reports[-1].paused


@pytest.mark.parametrize("away_seconds", [0.0, 60.0], ids=["still-draining", "drained-meanwhile"])
def test_a_new_leader_flips_what_the_one_before_it_drained_for_that(away_seconds):
    """When it looks for the first time it has heard nothing of agents and routers."""

    async def takeover():
        world = World(settings=QUICK, bounds=limits(budget=4, most=3), counts=Pools(prefill=1, decode=3))
        world.substrate.seconds["drain"] = 30.0
        for role in (P, D, D, D):
            await world.substrate.start(role)
        await asyncio.sleep(10)
        engines, loop = asyncio.create_task(world._engines()), asyncio.create_task(world.made().run())
        world.rate, world.output = 10.0, 5.0
        await polled(lambda: world.of("action", step="Drain"), every_seconds=0.1)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await asyncio.sleep(away_seconds)
        world.told, world.rate = {}, None
        loop = asyncio.create_task(world.made().run())
        await asyncio.sleep(60)
        for task in (engines, loop):
            task.cancel()
        await asyncio.gather(engines, loop, return_exceptions=True)
        await world.substrate.close()
        return world

    world = run_virtually(takeover())

    (_, moved), *rest = steps(world)
    assert rest == [("Flip", moved)]
    assert world.serving() == (2, 2)
    assert world.broken == []
