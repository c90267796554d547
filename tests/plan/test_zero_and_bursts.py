"""To no instance and back, bursts that nothing could follow, one pool for both roles, and how all of it is argued."""

from dataclasses import replace

import pytest
from plan.plan_helpers import IDLE, NO_TRAFFIC, OBJECTIVES, TIMING, D, P, fleet, limits, measured, model, traffic

from kllm_core.timing import EngineTiming, PrefillTiming
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.demand import Forecast, Stages
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits, PoolLimits
from kllm_operator.plan.outlook import Outlook
from kllm_operator.plan.planner import PlannerState, plan
from kllm_operator.plan.role_load import Term

START = CapacityTimes(start_seconds=10.0)
TO_ZERO = limits(least=0)


def decide(judged, *, now=0.0, state=None, bounds=TO_ZERO, **kwargs):
    return plan(judged, now=now, limits=bounds, state=state or PlannerState(), times=START, **kwargs)


def counts(decision):
    return decision.desired.prefill, decision.desired.decode


def idled(judged=None, seconds=700.0, bounds=TO_ZERO, **kwargs):
    """Decisions of a service that nobody asks for anything, each 5 s."""
    state, seen = PlannerState(), []
    for tick in range(int(seconds / 5)):
        decision = decide(judged or model(fleet(), NO_TRAFFIC), now=5.0 * tick, state=state, bounds=bounds, **kwargs)
        state = decision.state
        seen.append(decision)
    return seen


def test_both_roles_go_to_zero_in_one_decision_when_nobody_came_for_long():
    seen = idled()
    first = next(each for each in seen if 0 in counts(each))

    assert counts(first) == (0, 0)
    assert seen.index(first) * 5.0 == 600.0
    assert first.desired.reason == "ScaledToZero"
    assert counts(seen[-1]) == (0, 0)
    assert seen[-1].desired.reason == "Steady"


def test_whoever_comes_brings_one_of_each_back_at_once():
    asleep = idled()[-1].state
    woken = decide(model(fleet(0, 0), Forecast(requests_per_second=0.1)), now=705.0, state=asleep)

    assert counts(woken) == (1, 1)
    assert woken.desired.reason == "ScaledFromZero"
    quiet = decide(model(fleet(0, 0), NO_TRAFFIC), now=705.0, state=asleep)
    assert counts(quiet) == (0, 0)
    again = decide(model(fleet(0, 0, starting=(1, 1)), NO_TRAFFIC), now=710.0, state=woken.state)
    assert counts(again) == (1, 1), "who was just woken is not put to sleep for want of further requests"


@pytest.mark.parametrize(
    "judged",
    [
        model(fleet(), Forecast()),
        model(fleet(), replace(NO_TRAFFIC, complete=False)),
        model(fleet(p_load=None), NO_TRAFFIC),
        model(fleet(d_load=replace(IDLE, age_seconds=60.0)), NO_TRAFFIC),
        model(fleet(d_load=replace(IDLE, running_requests=1)), NO_TRAFFIC),
        model(fleet(p_load=replace(IDLE, queued_requests=1)), NO_TRAFFIC),
        model(fleet(), traffic(0.01)),
    ],
)
def test_silence_and_the_last_request_keep_one_of_each(judged):
    assert {counts(each) for each in idled(judged)} == {(1, 1)}


def test_silent_routers_wake_nobody():
    asleep = idled()[-1].state

    assert counts(decide(model(fleet(0, 0), Forecast()), now=705.0, state=asleep)) == (0, 0)


def test_without_minimum_0_nothing_goes_to_zero():
    assert counts(idled(bounds=limits())[-1]) == (1, 1)


def test_advice_about_zero_is_given_too():
    assert counts(idled(advise_only=True)[-1]) == (0, 0)


def at_rates(rates, busy=True, start=60.0):
    """Decisions of a service with one of each, at rates that follow one another each 5 s."""
    state, seen = PlannerState(), []
    for tick, rate in enumerate(rates):
        queued = replace(IDLE, queued_uncached_tokens=30_000 if busy and rate > 5 else 0)
        decision = plan(
            model(fleet(p_load=queued), traffic(rate)), now=5.0 * tick, limits=limits(), state=state,
            times=CapacityTimes(start_seconds=start),
        )  # fmt: skip
        state = decision.state
        seen.append(decision)
    return seen


def test_a_rise_within_the_time_of_a_start_is_named():
    last = at_rates([2.0] * 20 + [20.0] * 3)[-1]

    assert last.desired.reason == "DemandOutranStarts"
    assert last.why.burst.before == 2.0
    assert last.why.burst.rate == 20.0
    assert "demand rose from 2 to 20 requests/s" in last.desired.message
    assert "a start takes 60 s" in last.desired.message


@pytest.mark.parametrize("rates", [[2.0] * 40, [20.0] * 40, [2.0 + 0.1 * tick for tick in range(200)]])
def test_what_a_start_could_have_followed_is_not_called_a_burst(rates):
    assert at_rates(rates)[-1].why.burst is None


def one_pool(rate, count=2, load=IDLE, timing=TIMING, stages=None, output=100.0):
    judged = model(fleet(0, count, d_load=load), traffic(rate, output=output), stages)
    return replace(judged, one_pool=True, timing=timing)


ONE = Limits(PoolLimits(0, 0), PoolLimits(1, 8))


def test_one_pool_has_the_terms_of_both_roles():
    terms = {each.term for each in one_pool(5.0).at(D, 2).terms}

    assert terms == set(Term)
    assert one_pool(5.0).at(P, 1).strain == 0
    assert one_pool(5.0, load=replace(IDLE, queued_uncached_tokens=40_000)).now(D).term is Term.QUEUE_AND_PREFILL


def test_prompts_take_their_time_from_the_steps_of_one_pool():
    apart, together = (
        judged.at(D, 2, lasting=True).terms[0].load.predicted
        for judged in (model(fleet(0, 2), traffic(6.0)), one_pool(6.0))
    )
    share = 6.0 * TIMING.prefill.seconds(1000) / 2

    assert together > apart / (1 - share) * 0.99


@pytest.mark.parametrize("slow", [PrefillTiming(0.01, 5e-4, 0.0), TIMING.prefill])
def test_one_pool_grows_by_whichever_term_is_higher_and_prefill_stays_at_none(slow):
    judged = one_pool(9.0, 1, timing=EngineTiming(slow, TIMING.decode), output=300.0)
    decision = plan(judged, now=0.0, limits=ONE, state=PlannerState(), times=START)

    assert decision.desired.prefill == 0
    assert decision.desired.decode > 1
    assert [each.role for each in decision.why.roles] == [D]
    assert "prefill" not in decision.desired.message


def test_a_queue_is_measured_where_one_pool_computes():
    stages = Stages(queue=measured(3.0), prefill=measured(0.1))

    assert one_pool(0.1, stages=stages).now(D).load.value == pytest.approx(3.1)


def test_what_a_decision_was_weighed_against_is_there_as_numbers():
    ahead = Outlook(20.0, 0.9, level=10.0, expected=11.0, high={P: 12.0, D: 12.0}, highest={P: 13.0, D: 13.0})
    judged = LoadModel(OBJECTIVES, fleet(), model(fleet(), traffic(10.0)).demand, TIMING, outlook=ahead)
    dear = Limits(PoolLimits(1, 4, 2, price=3.0), PoolLimits(1, 4, 1))
    decision = plan(judged, now=0.0, limits=dear, state=PlannerState(), times=START)
    why = decision.why.of(P)

    assert (why.before, why.after) == (1, 2)
    assert why.forecast(1).strain > 1 > why.forecast(2).strain
    assert decision.why.cost == 2 * 2 * 3.0 + 1
    costs = {(each.prefill, each.decode): each.cost for each in decision.why.alternatives}
    assert costs == {(1, 1): 7.0, (3, 1): 19.0, (2, 2): 14.0}
    fewer = next(each for each in decision.why.alternatives if each.prefill == 1)
    assert fewer.loads[0] > 1
    assert "10 requests/s by now, 11 and hardly more than 12 in 20 s" in decision.desired.message


def test_who_waits_for_fewer_says_for_how_long():
    state = PlannerState()
    for now in (0.0, 10.0):
        decision = plan(model(fleet(prefill=2), NO_TRAFFIC), now=now, limits=limits(), state=state, times=START)
        state = decision.state

    assert "1 would do for 10 of 30 s" in decision.desired.message
    assert (decision.why.of(P).held_seconds, decision.why.of(P).patience_seconds) == (10.0, 30.0)


def test_growth_is_bounded_in_time_and_not_only_in_one_decision():
    judged, state, seen = model(fleet(), traffic(500.0)), PlannerState(), []
    for now in (0.0, 0.1, 0.2, 5.2):
        decision = plan(judged, now=now, limits=limits(most=64), state=state, times=START)
        state = decision.state
        seen.append(decision.desired.prefill)

    assert seen == [3, 3, 3, 6]


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price):
    with pytest.raises(ValueError, match="price"):
        PoolLimits(price=price)
