"""How slow steps really are is learned while engines run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_helpers import IDLE, NO_TRAFFIC, TIMING, fleet, traffic

from kllm_operator.plan.demand import Forecast
from kllm_operator.plan.fit import Fit


def learned(fit=None, ticks=100, prefill=None, step=None, forecast=None, running=4, age=1.0):
    told = replace(IDLE, age_seconds=age)
    seen = fleet(
        p_load=replace(told, prefill_tokens_per_second=prefill),
        d_load=replace(told, decode_step_seconds=step, running_requests=running, kv_used_tokens=0),
    )
    fit = fit or Fit(TIMING)
    for _ in range(ticks):
        fit = fit.learn(seen, forecast or traffic(1.0), fresh_seconds=5.0)
    return fit


def test_slow_engines_are_found_out_and_keep_the_form_of_the_prior():
    # By the prior a prompt of 1,000 tokens takes 0.11 s, and a step of four sequences 0.0116 s.
    timing = learned(prefill=1000 / 1.1, step=0.0348).timing

    assert timing.prefill.seconds(1000) == pytest.approx(1.1)
    assert timing.prefill.seconds(10) == pytest.approx(10 * TIMING.prefill.seconds(10))
    assert timing.decode.seconds(4, 0) == pytest.approx(0.0348)


def test_the_first_report_counts_in_full_and_later_ones_little():
    once = learned(ticks=1, step=0.0116 * 8)
    assert once.decode == pytest.approx(8.0)
    again = learned(once, ticks=1, step=0.0116)
    assert 6.0 < again.decode < 8.0


@pytest.mark.parametrize(
    "told",
    [
        {"prefill": 1.0, "step": 9.0, "age": 60.0},
        {"step": 9.0, "running": 0},
        {"prefill": 1.0, "forecast": Forecast()},
        {"prefill": 1.0, "forecast": NO_TRAFFIC},
        {"prefill": 0.0, "step": float("nan")},
    ],
)
def test_old_idle_and_impossible_reports_teach_nothing(told):
    assert learned(**told).timing == TIMING


def test_what_is_known_exactly_is_not_learned():
    assert learned(Fit(TIMING, exact=True), prefill=1.0, step=9.0).timing == TIMING


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e6))
def test_factors_are_bounded(prefill, step):
    fit = learned(ticks=3, prefill=prefill, step=step)

    assert 1 / 201 < fit.prefill < 201
    assert 1 / 201 < fit.decode < 201
