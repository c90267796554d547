"""Planner and reconciler together, tick by tick, on a small model of a substrate and of queues."""

from dataclasses import replace
from itertools import pairwise

import pytest
from plan.plan_helpers import IDLE, D, P, SmallSubstrate, limits, model, traffic

from kllm_core.fleet import Fleet, Instance, InstanceState
from kllm_core.steps import Drain, Flip, Start
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.members import Goal, Member
from kllm_operator.plan.planner import PlannerState, plan
from kllm_operator.plan.reconciler import next_step

TICK_SECONDS = 5.0
PREFILL_TOKENS_PER_SECOND = 9000.0


class Loop:
    """One tick: queues move, the planner decides, at most three steps are taken, every fourth time things settle."""

    def __init__(self, bounds, flippable=True, times=None):
        self.bounds, self.times = bounds, times
        self.substrate = SmallSubstrate(
            [Member(f"{role}-0", role, InstanceState.SERVING, flippable, in_flight=1) for role in (P, D)]
        )
        self.state, self.tick, self.queued, self.steps, self.counts = PlannerState(), 0, 0.0, [], []

    def run(self, ticks, rate, output):
        for _ in range(ticks):
            self._one(rate, output)
        return self

    def _one(self, rate, output):
        serving = max(1, len(self.substrate.serving(P)))
        self.queued += TICK_SECONDS * (rate * 1000 - serving * PREFILL_TOKENS_PER_SECOND)
        self.queued = max(0.0, self.queued)
        decision = plan(
            model(self._fleet(rate, output), traffic(rate, output=output)),
            now=self.tick * TICK_SECONDS, limits=self.bounds, state=self.state, times=self.times,
        )  # fmt: skip
        self.state = decision.state
        self.counts.append((decision.desired.prefill, decision.desired.decode))
        for _ in range(3):
            step = next_step(Goal(decision.desired, self.bounds, decision.flip_to), self._members()).step
            if step is None:
                break
            self.steps.append(step)
            self.substrate.apply(step)
            held = sum(self.bounds.of(member.role).gpus for member in self._members())
            assert self.bounds.fits(held)
            assert self.substrate.serving(P)
            assert self.substrate.serving(D)
        self.tick += 1
        if self.tick % 4 == 0:
            self.substrate.settle()

    def _members(self):
        return list(self.substrate.members.values())

    def _fleet(self, rate, output):
        share = max(1, len(self.substrate.serving(D)))
        loads = {
            P: replace(IDLE, queued_uncached_tokens=int(self.queued / max(1, len(self.substrate.serving(P))))),
            D: replace(IDLE, running_requests=int(rate * output * 0.03 / share)),
        }
        told = [
            Instance(m.id, m.role, m.state, load=loads[m.role], flippable=m.flippable)
            if m.state is InstanceState.SERVING
            else Instance(m.id, m.role, m.state, flippable=m.flippable)
            for m in self._members()
        ]
        return Fleet(0.0, {each.id: each for each in told})


def test_a_wave_takes_instances_and_its_end_gives_them_back():
    loop = Loop(limits(budget=12)).run(30, 1.0, 20).run(60, 30.0, 100)
    high = loop.counts[-1]
    loop.run(500, 0.0, 100)

    assert high[0] >= 4
    assert loop.counts[-1] == (1, 1)
    assert (len(loop.substrate.serving(P)), len(loop.substrate.serving(D))) == (1, 1)


@pytest.mark.parametrize("rate", [2.0, 8.0, 20.0, 33.0])
def test_constant_traffic_turns_each_pool_at_most_once(rate):
    loop = Loop(limits(budget=20)).run(400, rate, 200)

    for column in zip(*loop.counts, strict=True):
        signs = [after > before for before, after in pairwise(column) if after != before]
        assert sum(one is not two for one, two in pairwise(signs)) <= 1, column
    assert len(set(loop.counts[-100:])) == 1


def test_when_work_moves_from_decode_to_prefill_an_instance_flips_instead_of_a_start():
    cheap = CapacityTimes(start_seconds=60.0, drain_seconds=5.0, switch_seconds=3.0, lost_cache_seconds=1.0)
    loop = Loop(limits(budget=8), times=cheap).run(40, 4.0, 1500)
    assert loop.counts[-1][1] >= 3
    loop.run(8, 4.0, 10)
    before = len(loop.steps)
    loop.run(12, 12.0, 10)

    assert [type(step) for step in loop.steps[before:]] == [Drain, Flip]
    assert not any(isinstance(step, Start) for step in loop.steps[before:])
