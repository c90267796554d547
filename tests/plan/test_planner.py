"""Desired counts of both pools: what moves them, what never does, and that they come to rest."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import IDLE, NO_TRAFFIC, D, P, fleet, limits, measured, model, traffic

from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.demand import Forecast, Stages
from kllm_operator.plan.planner import PlannerState, plan
from kllm_operator.plan.settings import PlannerSettings

CHEAP_FLIP = CapacityTimes(start_seconds=60.0, drain_seconds=10.0, switch_seconds=3.0, lost_cache_seconds=2.0)


def decide(judged, *, now=1000.0, state=None, bounds=None, **kwargs):
    return plan(judged, now=now, limits=bounds or limits(), state=state or PlannerState(), **kwargs)


def counts(decision):
    return decision.desired.prefill, decision.desired.decode


def test_a_prefill_bound_load_moves_only_prefill():
    decision = decide(model(fleet(), traffic(10.0, output=20.0)))

    assert counts(decision) == (2, 1)
    assert decision.desired.reason == "ScaledUp"
    assert decision.desired.message.startswith("prefill 1 to 2: load ")
    assert "QueueAndPrefill, Predicted" in decision.desired.message


def test_a_decode_bound_load_moves_only_decode():
    decision = decide(model(fleet(), traffic(4.0, uncached=100.0, output=1500.0)))

    assert decision.desired.prefill == 1
    assert decision.desired.decode > 1


def test_it_scales_to_the_least_count_whose_forecast_load_is_under_the_aim():
    judged = model(fleet(prefill=4), traffic(55.0, output=10.0))
    chosen = decide(judged).desired.prefill

    assert chosen > 5
    assert judged.at(P, chosen).strain <= 1.0 < judged.at(P, chosen - 1).strain


def test_one_decision_at_most_doubles_a_pool():
    assert decide(model(fleet(prefill=3), traffic(10_000.0)), bounds=limits(most=100)).desired.prefill == 6


def test_instances_that_start_count_as_capacity():
    overloaded = traffic(10.0, output=20.0)
    first = decide(model(fleet(), overloaded))
    later = decide(model(fleet(starting=(1, 0)), overloaded), state=first.state)

    assert counts(first) == counts(later) == (2, 1)
    assert counts(decide(model(fleet(starting=(1, 0)), overloaded))) == (2, 1)


def test_where_more_must_have_been_needed_for_a_while_a_swing_adds_nothing_and_a_rise_does():
    patient = PlannerSettings(growth_starts=0.5, urgent_above=1e6)
    short, calm = model(fleet(), traffic(11.0, output=20.0)), model(fleet(), traffic(1.0, output=20.0))
    times = CapacityTimes(start_seconds=20.0)

    def last(*judged):
        state, asked = PlannerState(), []
        for tick, each in enumerate(judged):
            decision = decide(each, state=state, now=5.0 * tick, times=times, settings=patient)
            state = decision.state
            asked.append(decision.desired.prefill)
        return asked

    assert last(short, short, short) == [1, 1, 2]
    assert last(short, short, calm, short, short) == [1] * 5
    urgent = replace(patient, urgent_above=1.01)
    assert decide(short, times=times, settings=urgent).desired.prefill == 2


def test_a_measured_peak_asks_once_while_the_instances_start():
    judged = model(fleet(), traffic(1.0, output=10.0), Stages(queue=measured(1.2), prefill=measured(0.11)))
    state, asked = PlannerState(), []
    for tick in range(20):
        decision = decide(judged, state=state, now=5.0 * tick)
        state = decision.state
        asked.append(decision.desired.prefill)

    assert set(asked) == {2}
    assert decision.desired.reason == "AwaitingCapacity"


@pytest.mark.parametrize(("start_seconds", "ticks"), [(2.0, 6), (40.0, 8), (None, 12)])
def test_what_is_too_much_goes_when_fewer_have_done_for_the_length_of_a_start_and_never_more_than_half(
    start_seconds, ticks
):
    times = replace(CHEAP_FLIP, start_seconds=start_seconds)
    judged, state = model(fleet(prefill=5), NO_TRAFFIC), PlannerState()
    seen = []
    for tick in range(3 * ticks + 2):
        decision = decide(judged, state=state, now=5.0 * tick, times=times)
        state = decision.state
        judged = model(fleet(prefill=decision.desired.prefill), NO_TRAFFIC)
        seen.append(decision.desired.prefill)

    assert seen == [5] * ticks + [2] * (ticks + 1) + [1] * (ticks + 1)


def test_a_busy_moment_begins_the_stabilisation_time_anew():
    quiet, busy = model(fleet(prefill=2), NO_TRAFFIC), model(fleet(prefill=2), traffic(9.0, output=5.0))
    state = decide(quiet, now=0.0).state
    state = decide(busy, now=50.0, state=state).state

    assert decide(quiet, now=90.0, state=state).desired.prefill == 2


def test_what_does_not_serve_yet_is_given_up_sooner():
    judged = model(fleet(starting=(1, 0)), NO_TRAFFIC)
    state = decide(judged, now=0.0).state

    assert decide(judged, now=14.0, state=state).desired.prefill == 2
    assert decide(judged, now=15.0, state=state).desired.prefill == 1


def test_load_between_the_thresholds_moves_nothing():
    judged = model(fleet(prefill=2), traffic(9.0, output=5.0))

    assert judged.at(P, 2).strain < 1
    assert judged.at(P, 1).strain > 0.7
    state = decide(judged, now=0.0).state
    assert decide(judged, now=1e6, state=state).desired.prefill == 2


@pytest.mark.parametrize(
    "judged",
    [
        model(fleet(3, 3), Forecast()),
        model(fleet(3, 3), Forecast(requests_per_second=math.nan)),
        model(fleet(3, 3, p_load=None, d_load=None), NO_TRAFFIC),
        model(fleet(3, 3, replace(IDLE, age_seconds=60.0), replace(IDLE, age_seconds=math.nan)), NO_TRAFFIC),
    ],
)
def test_silence_takes_nothing_away(judged):
    state = decide(judged, now=0.0).state

    assert counts(decide(judged, now=1e6, state=state)) == (3, 3)


def test_nothing_goes_while_a_queue_breaks_the_objective_now_or_parked_kv_hides_prefills_load():
    queued = replace(IDLE, queued_uncached_tokens=8000)
    stuck = replace(IDLE, parked_tokens=10, parked_limit_tokens=10)

    for p_load in (queued, stuck):
        judged = model(fleet(prefill=4, p_load=p_load), traffic(0.1, output=5.0))
        assert judged.at(P, 3).strain < 0.7
        state = decide(judged, now=0.0).state
        assert decide(judged, now=1e6, state=state).desired.prefill == 4
    free = model(fleet(prefill=4), traffic(0.1, output=5.0))
    state = decide(free, now=0.0).state
    assert decide(free, now=1e6, state=state).desired.prefill < 4


def test_an_unknown_load_says_so():
    decision = decide(model(fleet(p_load=None, d_load=None), Forecast()))

    assert decision.desired.reason == "LoadUnknown"
    assert "load unknown" in decision.desired.message


def test_a_dead_instance_is_still_wanted():
    state = decide(model(fleet(prefill=3), Forecast())).state

    assert decide(model(fleet(prefill=2), Forecast()), state=state).desired.prefill == 3


def test_the_higher_load_gets_the_last_of_the_budget():
    both = traffic(12.0, output=400.0)
    judged = model(fleet(), both)
    highest = max((P, D), key=lambda role: judged.now(role).strain)
    decision = decide(judged, bounds=limits(budget=3))

    assert decision.desired.of(highest) == 2
    assert decision.desired.of(highest.other) == 1
    assert decision.desired.reason == "BudgetExhausted"
    assert "needs" in decision.desired.message


def test_at_the_maximum_it_says_so():
    assert decide(model(fleet(), traffic(100.0)), bounds=limits(most=1)).desired.reason == "MaxReplicasReached"


def test_a_smaller_budget_takes_from_the_less_loaded_pool():
    judged = model(fleet(prefill=3, decode=3), traffic(18.0, output=5.0))

    assert counts(decide(judged, bounds=limits(budget=5))) == (3, 2)


def short_prefill(**kwargs):
    return model(fleet(prefill=1, decode=3, **kwargs), traffic(11.0, output=5.0))


def test_a_cheap_flip_serves_the_pool_that_is_short_from_the_one_with_too_much():
    state = PlannerState(prefill=1, decode=3, decode_low=((2, 960.0),))
    decision = decide(short_prefill(flippable=True), state=state, times=CHEAP_FLIP)

    assert counts(decision) == (2, 2)
    assert (decision.flip_to, decision.desired.reason) == (P, "Rebalanced")


@pytest.mark.parametrize(
    ("flippable", "times", "low_since"),
    [
        (False, CHEAP_FLIP, 960.0),
        (True, replace(CHEAP_FLIP, lost_cache_seconds=70.0), 960.0),
        (True, replace(CHEAP_FLIP, switch_seconds=math.nan), 960.0),
        (True, None, 960.0),
        (True, CHEAP_FLIP, 999.0),
    ],
)
def test_without_a_possible_cheap_and_settled_flip_a_new_one_starts(flippable, times, low_since):
    state = PlannerState(prefill=1, decode=3, decode_low=((2, low_since),))
    decision = decide(short_prefill(flippable=flippable), state=state, times=times)

    assert counts(decision) == (2, 3)
    assert decision.flip_to is None


def test_a_flip_stays_decided_until_it_is_done_and_is_not_decided_twice():
    state = PlannerState(prefill=1, decode=3, decode_low=((2, 960.0),))
    first = decide(short_prefill(flippable=True), state=state, times=CHEAP_FLIP)
    draining = model(fleet(1, 2, draining=(0, 1), flippable=True), traffic(11.0, output=5.0))
    second = decide(draining, state=first.state, times=CHEAP_FLIP, now=1005.0)
    flipped = model(fleet(1, 2, starting=(1, 0), flippable=True), traffic(11.0, output=5.0))
    third = decide(flipped, state=second.state, times=CHEAP_FLIP, now=1010.0)

    assert counts(first) == counts(second) == counts(third) == (2, 2)
    assert (first.flip_to, second.flip_to, third.flip_to) == (P, P, None)


def test_with_the_budget_used_up_the_idle_pool_gives_even_without_a_flip():
    state = PlannerState(prefill=1, decode=3, decode_low=((2, 960.0),))
    decision = decide(short_prefill(), state=state, bounds=limits(budget=4))

    assert counts(decision) == (2, 2)
    assert decision.flip_to is None


def test_advice_is_judged_by_what_is_there_and_is_not_remembered():
    judged = model(fleet(), traffic(10.0, output=20.0))
    decision = decide(judged, state=PlannerState(prefill=9, decode=9), advise_only=True)

    assert counts(decision) == (2, 1)
    assert decision.advise_only
    assert (decision.state.prefill, decision.state.decode) == (None, None)


def test_thresholds_that_would_oscillate_are_refused():
    with pytest.raises(ValueError, match="scale_down_below < aim_below"):
        PlannerSettings(scale_down_below=1.0)


maybe = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 2000))
tokens = st.one_of(st.none(), st.integers(-5, 10**6))
engine_loads = st.none() | st.builds(
    lambda age, running, queued, used, water, parked: replace(
        IDLE, age_seconds=age, running_requests=running, queued_uncached_tokens=queued, kv_used_tokens=used,
        kv_high_water_tokens=water, parked_tokens=parked, parked_limit_tokens=1000, queued_requests=queued,
        parked_requests=parked,
    ),
    st.floats(allow_nan=True), tokens, tokens, tokens, tokens, tokens,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bounds_and_budget_hold_whatever_it_is_told(data):
    small = st.integers(0, 6)
    gpus = (data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)))
    bounds = limits(data.draw(st.none() | st.integers(sum(gpus), 20)), data.draw(st.integers(1, 8)), gpus=gpus)
    seen = fleet(
        data.draw(small), data.draw(small), data.draw(engine_loads), data.draw(engine_loads),
        (data.draw(small), data.draw(small)), (data.draw(small), 0), data.draw(st.booleans()),
    )  # fmt: skip
    forecast = Forecast(*(data.draw(maybe) for _ in range(5)), accept_length=data.draw(st.floats(allow_nan=True)))
    slow = measured(data.draw(st.floats(allow_nan=True)))
    since = st.lists(st.tuples(st.integers(0, 8), st.floats(0, 2000)), max_size=4).map(tuple)
    state = PlannerState(
        data.draw(st.none() | st.integers(0, 20)), data.draw(st.none() | st.integers(0, 20)),
        data.draw(since), data.draw(since), data.draw(st.none() | st.sampled_from([P, D])),
    )  # fmt: skip
    judged = model(seen, forecast, Stages(queue=slow, admission=slow, tpot=slow))
    decision = decide(judged, state=state, bounds=bounds, times=CHEAP_FLIP)

    for role in (P, D):
        assert bounds.of(role).min_replicas <= decision.desired.of(role) <= bounds.of(role).max_replicas
    assert bounds.fits(bounds.gpus(*counts(decision)))


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 200), st.floats(0, 200), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_more_traffic_never_asks_for_less(rate, more, prefill, decode, long_low):
    low = (((prefill - 1, 0.0),), ((decode - 1, 0.0),)) if long_low else ((), ())
    state = PlannerState(prefill, decode, *low)
    low, high = (decide(model(fleet(prefill, decode), traffic(r)), state=state) for r in (rate, rate + more))

    assert low.desired.prefill <= high.desired.prefill
    assert low.desired.decode <= high.desired.decode


@pytest.mark.parametrize("rate", [0.5, 3.0, 8.2, 14.0, 27.0, 44.0])
@pytest.mark.parametrize("start", [1, 8])
def test_at_constant_load_counts_come_to_rest(rate, start):
    """Closed loop: queues and batches follow from the counts, starts take four ticks, reports wobble by a tenth."""
    serving, pending, state, seen = {P: start, D: start}, [], PlannerState(), []
    for tick in range(200):
        begun = {role: sum(r is role for r, _ in pending) for role in (P, D)}
        wobble = 1 + 0.1 * math.sin(tick * 1.7)
        over = max(0.0, rate * 0.11 / serving[P] - 1)
        p_load = replace(IDLE, queued_uncached_tokens=int(over * 5000))
        batch = min(150, int(rate * 100 * 0.02 / serving[D]))
        seen_now = fleet(serving[P], serving[D], p_load, replace(IDLE, running_requests=batch), (begun[P], begun[D]))
        stages = Stages(queue=measured(over * 5), prefill=measured(0.11)) if tick > 4 else Stages()
        judged = model(seen_now, traffic(rate * (wobble if tick < 60 else 1.0)), stages)
        decision = decide(judged, state=state, now=5.0 * tick, bounds=limits(most=20, budget=30))
        state = decision.state
        seen.append(counts(decision))
        pending = [(role, left - 1) for role, left in pending]
        for role in (P, D):
            serving[role] += sum(r is role and left <= 0 for r, left in pending)
            started = sum(r is role and left > 0 for r, left in pending)
            missing = decision.desired.of(role) - serving[role] - started
            pending += [(role, 4)] * missing
            serving[role] = min(serving[role], decision.desired.of(role))
        pending = [each for each in pending if each[1] > 0]

    for column in zip(*seen, strict=True):
        steps = [after - before for before, after in pairwise(column) if after != before]
        turns = sum((one > 0) is not (two > 0) for one, two in pairwise(steps))
        assert turns <= 1, column
    if start == 1:
        assert len(set(seen[100:])) == 1, seen


def test_a_step_of_load_is_overshot_by_one_instance_at_most():
    rate, serving, state, most = 30.0, 1, PlannerState(), 0
    for tick in range(40):
        queued = replace(IDLE, queued_uncached_tokens=4000 if serving < 4 else 0)
        seen = fleet(serving, 4, queued, starting=(max(0, most - serving), 0))
        decision = decide(model(seen, traffic(rate, output=5.0)), state=state, now=5.0 * tick)
        state, most = decision.state, max(most, decision.desired.prefill)
        serving = min(decision.desired.prefill, serving + (tick % 4 == 3))

    ideal = next(n for n in range(1, 20) if model(fleet(), traffic(rate, output=5.0)).at(P, n).strain <= 1.0)
    assert most <= ideal + 1


def test_a_way_that_takes_too_long_with_any_count_keeps_no_instance():
    """Transfers that last, say because prefill is busy, are no reason for many decode instances."""
    slow = Stages(transfer=measured(3.0))
    state, asked = PlannerState(), []
    for tick in range(60):
        decision = decide(model(fleet(decode=3), NO_TRAFFIC, slow), state=state, now=5.0 * tick)
        state = decision.state
        asked.append(decision.desired.decode)

    assert decision.loads[1].load.value > 1
    assert asked[-1] < 3
    waits = Stages(transfer=measured(0.1), admission=measured(3.0))
    assert model(fleet(decode=3), NO_TRAFFIC, waits).at(D, 2).strain_of_count > 1


def test_a_router_that_is_silent_takes_nothing_away():
    hidden = replace(NO_TRAFFIC, complete=False)
    state = PlannerState()
    for tick in range(80):
        decision = decide(model(fleet(prefill=3), hidden), state=state, now=5.0 * tick)
        state = decision.state

    assert counts(decision) == (3, 1)
