"""Demand ahead: what head-room follows from it, and what teaches nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import NO_TRAFFIC, D, P, fleet, model, traffic

from kllm_operator.plan.demand import Forecast, Totals
from kllm_operator.plan.outlook import Course

TICK = 5.0


def told(totals, rate=1.0):
    """A forecast as routers' reports make it."""
    return replace(traffic(rate), totals=totals)


def stream(rates, *, prompt=1000, cached=200, output=100, tick=TICK, seed=1, course=None, begin=0.0):
    """The course of a stream of Poisson arrivals, one observation a tick."""
    generator = np.random.default_rng(seed)
    course, totals = course or Course(), Totals(begin)
    course = course.observe(told(totals), begin)
    for rate in rates:
        came = int(generator.poisson(rate * tick))
        totals = Totals(
            totals.at + tick, totals.seconds + tick, totals.arrivals + came, totals.prompt_tokens + came * prompt,
            totals.ended + came, totals.cached_tokens + came * cached, totals.output_tokens + came * output,
        )  # fmt: skip
        course = course.observe(told(totals, rate), totals.at)
    return course


def headroom(course, seconds, quantile=0.9):
    ahead = course.ahead(seconds, quantile)
    return ahead.high[P] / ahead.level


def test_rates_and_lengths_come_from_sums():
    ahead = stream([4.0] * 100).ahead(10.0, 0.9)

    assert ahead.level == pytest.approx(4.0, rel=0.15)
    assert (ahead.prompt_tokens, ahead.cached_tokens, ahead.output_tokens) == pytest.approx((1000, 200, 100))
    assert ahead.level < ahead.high[P] < 1.4 * ahead.level


def test_short_starts_need_almost_no_headroom_and_long_ones_much():
    course = stream([4.0] * 60 + [6.0] * 60 + [3.0] * 60 + [5.0] * 40)
    short, minute, long = (headroom(course, seconds) for seconds in (2.0, 60.0, 300.0))

    assert 1.0 < short < 1.2
    assert short < minute < long
    assert long - 1 > 2 * (short - 1)


def test_a_rise_is_provided_for_before_it_has_come():
    rising = [2.0 + 0.02 * TICK * tick for tick in range(80)]
    ahead = stream(rising).ahead(60.0, 0.9)

    assert ahead.expected > ahead.level + 0.5
    assert ahead.high[D] > rising[-1] + 60 * 0.02 * 0.9


def test_what_falls_counts_as_it_is_by_now_for_whoever_gives_up_instances():
    falling = [20.0 - 0.04 * TICK * tick for tick in range(80)]
    ahead = stream(falling).ahead(60.0, 0.9)

    assert ahead.expected < ahead.level
    assert ahead.highest[P] > 1.05 * ahead.level
    assert ahead.high[P] < ahead.highest[P]


def test_lengths_that_vary_widen_the_band_of_the_role_that_they_are_work_for():
    generator = np.random.default_rng(2)
    course, totals = Course(), Totals(0.0)
    course = course.observe(told(totals), 0.0)
    for _ in range(60):
        outputs = int(generator.exponential(400.0, 10).sum())
        totals = Totals(
            totals.at + TICK, totals.seconds + TICK, totals.arrivals + 10, totals.prompt_tokens + 10_000,
            totals.ended + 10, totals.cached_tokens, totals.output_tokens + outputs,
        )  # fmt: skip
        course = course.observe(told(totals), totals.at)
    ahead = course.ahead(10.0, 0.9)

    assert ahead.high[D] > 1.03 * ahead.high[P]


def test_the_time_of_silence_is_no_time_without_traffic():
    course = stream([4.0] * 50)
    gap = course.totals.at + 600.0
    came = replace(
        course.totals, at=gap + TICK, seconds=course.totals.seconds + TICK, arrivals=course.totals.arrivals + 20
    )
    after = course.observe(told(came), gap + TICK)

    assert after.ahead(0.0, 0.9).level == pytest.approx(4.0, rel=0.25)


def test_a_router_that_begins_anew_does_not_make_a_rate():
    course = stream([4.0] * 50)
    begun = course.observe(told(Totals(course.at + TICK)), course.at + TICK)

    assert begun.ahead(0.0, 0.9).level == course.ahead(0.0, 0.9).level


@pytest.mark.parametrize("rate", [None, math.nan, math.inf, -1.0, 1e13])
def test_what_is_no_rate_teaches_nothing(rate):
    course = stream([4.0] * 10)

    assert course.observe(Forecast(requests_per_second=rate), course.at + 60) is course


def test_nothing_is_foreseen_before_anything_was_seen():
    assert Course().ahead(10.0, 0.9) is None
    assert Course().observe(told(Totals(0.0)), 0.0).ahead(10.0, 0.9) is None


def test_without_sums_the_rate_that_is_told_is_what_was_seen():
    course = Course()
    for tick in range(30):
        course = course.observe(traffic(3.0), TICK * tick)

    assert course.ahead(0.0, 0.9).level == pytest.approx(3.0)
    assert course.ahead(0.0, 0.9).output_tokens == pytest.approx(100.0)


def test_an_unknown_rate_stays_unknown_whatever_was_foreseen():
    judged = replace(model(fleet(), Forecast()), outlook=stream([4.0] * 20).ahead(10.0, 0.9))

    assert not judged.at(P, 2).complete
    assert judged.outlook.asked(P, Forecast(), lasting=True, spare=0.5) == Forecast()


def test_loads_ahead_are_those_of_what_is_provided_for():
    ahead = stream([4.0] * 60).ahead(60.0, 0.9)
    judged = replace(model(fleet(), traffic(1.0)), outlook=ahead)
    asked = model(fleet(), ahead.asked(P, traffic(1.0), lasting=False, spare=0.0))

    assert judged.at(P, 1).strain == asked.at(P, 1).strain
    assert judged.at(P, 1, spare=0.2).strain > judged.at(P, 1).strain
    assert judged.now(P).strain < judged.at(P, 1, lasting=True).strain


rates = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e4))
lengths = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e6))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(rates, lengths, lengths, lengths, st.floats(-5, 400)), min_size=1, max_size=30),
    st.floats(0, 3600), st.floats(0.5, 0.999),
)  # fmt: skip
def test_an_outlook_is_finite_and_orders_whatever_was_told(looks, seconds, quantile):
    course, now = Course(), 0.0
    for rate, uncached, cached, output, later in looks:
        now += later
        course = course.observe(Forecast(rate, uncached, None, cached, output), now)
        ahead = course.ahead(seconds, quantile)
        if ahead is None:
            continue
        for role in (P, D):
            assert 0 <= ahead.expected <= ahead.high[role] <= ahead.highest[role] < math.inf
        assert 0 <= ahead.level < math.inf
        assert ahead.asked(P, NO_TRAFFIC, lasting=True, spare=0.1).requests_per_second < math.inf
