"""What the planner is given, and what is kept of it between decisions."""

from dataclasses import replace

import pytest
from plan.plan_helpers import IDLE, OBJECTIVES, TIMING, D, P, fleet, limits, measured, traffic

from kllm_core.objectives import Role
from kllm_core.timing import PRIOR
from kllm_operator.fleet.snapshot import Snapshot
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.deciding import Deciding, Scaled
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.demand import Stages
from kllm_operator.plan.members import Limits, PoolLimits


class Said:
    """Routers that tell of a rate, and of queues."""

    told = {}  # noqa: RUF012 - no agent has told anything
    rate = 4.0
    ages = None

    def forecast(self, now):
        return traffic(self.rate)

    def stages(self, now, *, percentile, changed_age_seconds):
        self.ages = {role: changed_age_seconds(role) for role in Role}
        return Stages(queue=measured(0.1))


def deciding(start=None, settings=None, **scaled):
    bounds = scaled.pop("limits", limits())
    said, book = Said(), CapacityBook(start)
    made = Deciding(Scaled(OBJECTIVES, bounds, **scaled), settings or LoopSettings(), heard=said, book=book)
    return made, said, book


def seen(*args, **kwargs):
    return Snapshot((), fleet(*args, **kwargs), ())


def decide(made, look, now, **kwargs):
    given = {"limits": made.scaled.limits, "asked": None, "advise": False, **kwargs}
    return made.decide(look, now, **given)


@pytest.mark.parametrize(("start", "seconds"), [(2.0, 15.0), (300.0, 310.0), (None, 70.0)])
def test_demand_is_looked_at_for_as_long_as_a_start_takes_and_a_tick_and_a_margin(start, seconds):
    made, _, _ = deciding(start)

    assert decide(made, seen(), 0.0).why.outlook.seconds == seconds


def test_a_rate_that_is_looked_at_often_between_decisions_is_remembered_once():
    made, said, _ = deciding()
    for tick in range(20):
        decide(made, seen(), 5.0 * tick)
    said.rate = 40.0
    first = made.model(seen(), 96.0)
    again = made.model(seen(), 96.0)
    said.rate = 4.0

    assert first.outlook.level > 10
    assert again.outlook == first.outlook
    assert made.model(seen(), 97.0).outlook.level == pytest.approx(4.0, rel=0.1)


def test_what_engines_tell_changes_a_prior_and_not_a_timing_that_is_known():
    slow = seen(d_load=replace(IDLE, decode_step_seconds=1.0, running_requests=1))
    learning, known = deciding(prior=TIMING)[0], deciding(timing=TIMING)[0]

    assert learning.model(slow, 0.0).timing == TIMING
    for made in (learning, known):
        decide(made, slow, 0.0)
    assert learning.model(slow, 1.0).timing.decode.seconds(1, 0) == pytest.approx(1.0, rel=0.01)
    assert known.model(slow, 1.0).timing == TIMING
    assert deciding()[0].model(slow, 0.0).timing == PRIOR


def test_another_prior_begins_anew_and_other_limits_do_not():
    made, _, _ = deciding(prior=TIMING)
    slow = seen(d_load=replace(IDLE, decode_step_seconds=1.0, running_requests=1))
    decide(made, slow, 0.0)
    made.change(replace(made.scaled, limits=limits(most=3)), LoopSettings())
    assert made.model(slow, 1.0).timing != TIMING

    made.change(replace(made.scaled, prior=PRIOR), LoopSettings())
    assert made.model(slow, 2.0).timing == PRIOR


def test_in_one_pool_queues_are_those_of_the_capacity_that_changed():
    bounds = Limits(PoolLimits(0, 0), PoolLimits(1, 4))
    made, said, book = deciding(limits=bounds, one_pool=True)
    book.observe(fleet(0, 1), now=0.0)
    book.observe(fleet(0, 2), now=10.0)
    decision = decide(made, seen(0, 2), 15.0)

    assert said.ages == {P: 5.0, D: 5.0}
    assert decision.desired.prefill == 0


def test_who_takes_over_at_zero_stays_there_until_somebody_comes():
    made, said, _ = deciding(limits=limits(least=0))
    said.rate = 0.0
    asked = {P: 0, D: 0}
    assert decide(made, seen(0, 0), 0.0, asked=asked).desired.of(P) == 0

    said.rate = 0.1
    woken = decide(made, seen(0, 0), 5.0, asked=asked)
    assert (woken.desired.prefill, woken.desired.decode) == (1, 1)


def test_what_engines_that_speculate_yield_per_step_is_counted_with():
    plain, quick = deciding(timing=TIMING)[0], deciding(timing=TIMING)[0]
    for made, length in ((plain, None), (quick, 2.5)):
        made.look = seen(d_load=replace(IDLE, accept_length=length))

    assert plain.model(plain.look, 0.0).demand.forecast.accept_length == 1.0
    model = quick.model(quick.look, 0.0)
    assert model.demand.forecast.accept_length == 2.5
    assert model.at(D, 1).predicted_strain < plain.model(plain.look, 0.0).at(D, 1).predicted_strain
