"""Planner and reconciler under anything that may happen, in any order, with plans that are cut off anywhere.

Whatever the demand, and whatever engines and routers tell or do not tell: bounds and budget hold, nothing is asked for
twice, and what is not known takes nothing away.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plan.plan_helpers import IDLE, OBJECTIVES, TIMING, D, P, SmallSubstrate, limits, traffic

from kllm_core.fleet import Fleet, Instance, InstanceState
from kllm_core.steps import Start
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.demand import Demand, Forecast, Totals
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Goal, Member
from kllm_operator.plan.outlook import Course
from kllm_operator.plan.planner import PlannerState, plan
from kllm_operator.plan.reconciler import next_step
from kllm_operator.plan.settings import LoadSettings

TICK = 5.0
TIMES = CapacityTimes(start_seconds=20.0, drain_seconds=5.0, switch_seconds=1.0, lost_cache_seconds=1.0)
SERVING, STARTING = InstanceState.SERVING, InstanceState.STARTING
BAD = [math.nan, math.inf, -math.inf, -1.0, 1e15]


class Service:
    """Two pools whose queues and batches follow from Poisson arrivals as a fluid.

    Attributes:
        rate: that truly arrives.
        told: what the routers say instead; None: the truth.
        stale: age of what engines say.
    """

    def __init__(self, bounds, *, start_ticks=4, seed=0, output=100.0):
        self.bounds, self.start_ticks, self.output = bounds, start_ticks, output
        self.substrate = SmallSubstrate(
            [
                Member(f"{role}-{number}", role, SERVING, True, in_flight=1)
                for role in (P, D)
                for number in range(max(1, bounds.of(role).min_replicas))
            ]
        )
        self.random = np.random.default_rng(seed)
        self.rate, self.told, self.stale = 0.0, None, 1.0
        self.tick, self.queued, self.running = 0, 0.0, 0.0
        self.totals, self.course, self.state = Totals(0.0), Course(), PlannerState()
        self.born, self.desired, self.changes = {}, None, []

    @property
    def now(self):
        return self.tick * TICK

    def serving(self, role):
        return len(self.substrate.serving(role))

    def one_tick(self, steps=8):
        """Time goes on, the planner decides, and at most so many steps are taken before the plan is cut off."""
        self.tick += 1
        self._move()
        decision = plan(
            self.model(), now=self.now, limits=self.bounds, state=self.state,
            times=replace(TIMES, start_seconds=self.start_ticks * TICK),
        )  # fmt: skip
        self.state = decision.state
        counts = decision.desired.prefill, decision.desired.decode
        if self.desired is not None and counts != self.desired:
            self.changes.append((self.now, self.desired, counts, decision.desired.reason, decision.desired.message))
        self.desired = counts
        for _ in range(steps):
            step = next_step(Goal(decision.desired, self.bounds, decision.flip_to), self.members()).step
            if step is None:
                break
            self.substrate.apply(step)
            if isinstance(step, Start):
                self.born[f"new-{self.substrate.made}"] = self.tick
        return decision

    def members(self):
        return list(self.substrate.members.values())

    def model(self):
        forecast = self.told
        if forecast is None:
            forecast = replace(traffic(self.rate, output=self.output), totals=self.totals)
        self.course = self.course.observe(forecast, self.now)
        lead = self.start_ticks * TICK + 2 * TICK
        return LoadModel(
            OBJECTIVES, self._fleet(), Demand(forecast), TIMING,
            LoadSettings(horizon_seconds=self.start_ticks * TICK), outlook=self.course.ahead(lead, 0.9),
        )  # fmt: skip

    def _move(self):
        came = int(self.random.poisson(self.rate * TICK))
        before = self.totals
        self.totals = Totals(
            before.at + TICK, before.seconds + TICK, before.arrivals + came, before.prompt_tokens + 1000 * came,
            before.ended + came, 0, before.output_tokens + round(self.output * came),
        )  # fmt: skip
        self.queued = max(0.0, self.queued + came * 0.11 - TICK * max(1, self.serving(P)))
        decodes = max(1, self.serving(D))
        self.running += came
        step = TIMING.decode.seconds(max(1, math.ceil(self.running / decodes)), 0)
        self.running = max(0.0, self.running - TICK * self.running / (self.output * step + TICK))
        for member in self.members():
            if member.state is STARTING and self.tick - self.born.get(member.id, -99) >= self.start_ticks:
                self.substrate.members[member.id] = replace(member, state=SERVING, proven=True)
            elif member.state is InstanceState.DRAINING:
                self.substrate.members[member.id] = replace(member, in_flight=0)

    def _fleet(self):
        loads = {
            P: replace(IDLE, age_seconds=self.stale, queued_uncached_tokens=int(self.queued / 0.11 * 1000)),
            D: replace(IDLE, age_seconds=self.stale, running_requests=int(self.running / max(1, self.serving(D)))),
        }
        told = [
            Instance(m.id, m.role, m.state, load=loads[m.role] if m.state is SERVING else None, flippable=m.flippable)
            for m in self.members()
        ]
        return Fleet(self.now, {each.id: each for each in told})


class Anything(RuleBasedStateMachine):
    """All that may happen to a service."""

    def __init__(self):
        super().__init__()
        self.service = None

    @initialize(
        budget=st.none() | st.integers(3, 12), most=st.integers(1, 8), least=st.integers(0, 1),
        gpus=st.sampled_from([(1, 1), (2, 1), (1, 2)]), start=st.sampled_from([1, 4, 20]), seed=st.integers(0, 99),
    )  # fmt: skip
    def begin(self, budget, most, least, gpus, start, seed):
        self.service = Service(limits(budget, most, least, gpus), start_ticks=start, seed=seed)

    @rule(rate=st.floats(0, 60), output=st.sampled_from([5.0, 100.0, 1000.0]))
    def demand_changes(self, rate, output):
        self.service.rate, self.service.output = rate, output

    @rule(ticks=st.integers(1, 12), steps=st.integers(0, 3))
    def time_goes_on(self, ticks, steps):
        """Plans are cut off after any number of steps."""
        for _ in range(ticks):
            self._tick(steps)

    @rule(ticks=st.integers(1, 60), rate=st.sampled_from([0.0, 10.0]))
    def routers_are_silent(self, ticks, rate):
        self._unsure(ticks, told=Forecast(), rate=rate)

    @rule(ticks=st.integers(1, 20), bad=st.sampled_from(BAD))
    def routers_tell_nonsense(self, ticks, bad):
        self._unsure(ticks, told=Forecast(bad, bad, bad, bad, bad, bad))

    @rule(ticks=st.integers(1, 60), rate=st.sampled_from([0.0, 10.0]))
    def engines_are_silent(self, ticks, rate):
        self._unsure(ticks, stale=60.0, rate=rate)

    @rule(role=st.sampled_from([P, D]))
    def an_instance_dies(self, role):
        for member in self.service.substrate.serving(role)[:1]:
            self.service.substrate.members[member.id] = replace(member, state=InstanceState.FAILED)

    @rule()
    def another_leader_takes_over(self):
        """It knows the counts that stand, and nothing else."""
        counts = self.service.desired or (None, None)
        self.service.state, self.service.course = PlannerState(*counts), Course()

    @precondition(lambda self: self.service is not None)
    @invariant()
    def bounds_and_budget_hold(self):
        service = self.service
        held = sum(service.bounds.of(member.role).gpus for member in service.members())
        assert service.bounds.fits(held)
        if service.desired is None:
            return
        for role, count in zip((P, D), service.desired, strict=True):
            pool = service.bounds.of(role)
            assert pool.min_replicas <= count <= pool.max_replicas
        assert service.bounds.fits(service.bounds.gpus(*service.desired))

    def _unsure(self, ticks, **changes):
        for name, value in changes.items():
            setattr(self.service, name, value)
        before = self.service.desired
        # Where nobody serves, nobody is silent, and what the routers tell is all that there is to be known.
        serve = [self.service.serving(role) > 0 for role in (P, D)]
        for _ in range(ticks):
            self._tick(steps=8)
        self.service.told, self.service.stale = None, 1.0
        if before is None:
            return
        after = self.service.desired
        for role in (0, 1):
            given = after[role] < before[role] and after[1 - role] <= before[1 - role]
            assert not (given and serve[role]), "what is not known takes nothing away"

    def _tick(self, steps):
        """Instances on their way are part of what is wanted: nothing is asked for twice."""
        service = self.service
        before = {role: self._coming(role) for role in (P, D)}
        service.one_tick(steps)
        for role, count in zip((P, D), service.desired, strict=True):
            assert self._coming(role) <= max(before[role], count)

    def _coming(self, role):
        there = self.service.members()
        return sum(m.role is role and m.state in {SERVING, STARTING} for m in there)


Anything.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnything = Anything.TestCase


@pytest.mark.parametrize("start_ticks", [1, 4, 20])
@pytest.mark.parametrize("rate", [1.5, 6.0, 17.0])
def test_an_hour_of_flat_load_changes_nothing(rate, start_ticks):
    """Arrivals are Poisson's: what is chance moves no count, neither with fast starts nor with slow ones."""
    service = Service(limits(most=16), start_ticks=start_ticks, seed=7)
    service.rate = rate
    for _ in range(120):
        service.one_tick()
    service.changes.clear()
    for _ in range(720):
        service.one_tick()

    assert service.changes == []
    assert service.queued < 5


@pytest.mark.parametrize("start_ticks", [1, 4, 20])
def test_fast_starts_hold_fewer_instances_through_the_same_waves(start_ticks):
    held = {}
    for ticks in (1, start_ticks):
        service, total = Service(limits(most=16), start_ticks=ticks, seed=3), 0
        for tick in range(720):
            service.rate = 12.0 + 8.0 * math.sin(tick / 720 * 6 * math.pi)
            service.one_tick()
            total += sum(m.state is not InstanceState.FAILED for m in service.members())
        held[ticks] = total / 720

    assert held[1] <= held[start_ticks] + 0.1
