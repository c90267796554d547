"""How slow steps really are is learned while engines run."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import IDLE, NO_TRAFFIC, TIMING, fleet, traffic

from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming
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


@settings(deadline=None)
@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e6))
def test_factors_are_bounded(prefill, step):
    fit = learned(ticks=3, prefill=prefill, step=step)

    assert 1 / 201 < fit.prefill < 201
    assert 1 / 201 < fit.decode < 201


TIMING_OF_ANOTHER = EngineTiming(PrefillTiming(a=0.01, b=1e-4, k=1e-9), DecodeTiming(a=0.01, b=2e-4, c=1e-8))
TRUE = EngineTiming(PrefillTiming(a=0.03, b=5e-5, k=4e-9), DecodeTiming(a=0.02, b=1e-4, c=2e-8))


def at_work(fit, batch, kv, prompt=1000.0, ticks=40, noise=None):
    """What engines of another timing tell while they have so much to do."""
    for tick in range(ticks):
        off = 1.0 if noise is None else noise[tick % len(noise)]
        step = TRUE.decode.seconds(batch, kv) * off
        rate = prompt / TRUE.prefill.seconds(int(prompt)) / off
        seen = fleet(
            p_load=replace(IDLE, prefill_tokens_per_second=rate),
            d_load=replace(IDLE, decode_step_seconds=step, running_requests=batch, kv_used_tokens=kv),
        )
        fit = fit.learn(seen, traffic(1.0, prompt), fresh_seconds=5.0)
    return fit


def test_coefficients_are_told_apart_by_loads_that_differ():
    fit = Fit(TIMING_OF_ANOTHER)
    for batch, kv, prompt in ((2, 4_000, 500.0), (16, 32_000, 2000.0), (60, 200_000, 8000.0)):
        fit = at_work(fit, batch, kv, prompt)

    for batch, kv in ((1, 2_000), (30, 90_000), (150, 500_000)):
        assert fit.timing.decode.seconds(batch, kv) == pytest.approx(TRUE.decode.seconds(batch, kv), rel=0.15)
    for prompt in (300, 4000, 12_000):
        assert fit.timing.prefill.seconds(prompt) == pytest.approx(TRUE.prefill.seconds(prompt), rel=0.15)


def test_what_was_seen_of_other_loads_is_remembered_through_hours_of_one_load():
    fit = at_work(at_work(Fit(TIMING_OF_ANOTHER), 2, 4_000), 100, 300_000)
    fit = at_work(fit, 2, 4_000, ticks=1000)

    assert fit.timing.decode.seconds(100, 300_000) == pytest.approx(TRUE.decode.seconds(100, 300_000), rel=0.1)


def test_one_load_alone_leaves_the_form_of_the_prior():
    fit = at_work(Fit(TIMING_OF_ANOTHER), 16, 32_000)
    prior = TIMING_OF_ANOTHER.decode
    ratio = TRUE.decode.seconds(16, 32_000) / prior.seconds(16, 32_000)

    assert fit.timing.decode.seconds(16, 32_000) == pytest.approx(TRUE.decode.seconds(16, 32_000), rel=0.02)
    assert fit.timing.decode.seconds(64, 128_000) == pytest.approx(ratio * prior.seconds(64, 128_000), rel=0.05)


def test_hiccups_and_noise_do_not_bend_the_coefficients():
    noise = [1.0, 0.95, 1.04, 30.0, 1.02, 0.97, 1.0, 1.03, 0.98, 1.01]
    fit = Fit(TIMING_OF_ANOTHER)
    for batch, kv, prompt in ((2, 4_000, 500.0), (16, 32_000, 2000.0), (60, 200_000, 8000.0)):
        fit = at_work(fit, batch, kv, prompt, noise=noise)

    assert fit.timing.decode.seconds(30, 90_000) == pytest.approx(TRUE.decode.seconds(30, 90_000), rel=0.3)
    assert fit.timing.prefill.seconds(4000) == pytest.approx(TRUE.prefill.seconds(4000), rel=0.3)


def test_a_new_engine_is_learned_though_the_old_one_was_known_well():
    fit = at_work(Fit(TIMING_OF_ANOTHER), 16, 32_000, ticks=1000)
    slower = fleet(
        d_load=replace(
            IDLE, decode_step_seconds=4 * TRUE.decode.seconds(16, 32_000), running_requests=16, kv_used_tokens=32_000
        )
    )
    for _ in range(60):
        fit = fit.learn(slower, traffic(1.0), fresh_seconds=5.0)

    assert fit.timing.decode.seconds(16, 32_000) == pytest.approx(4 * TRUE.decode.seconds(16, 32_000), rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10**5), st.integers(-5, 10**8), st.floats(), st.floats()), max_size=30))
def test_whatever_engines_tell_the_timing_is_possible_and_bounded(reports):
    fit = Fit(TIMING)
    for running, used, step, rate in reports:
        told = replace(
            IDLE,
            prefill_tokens_per_second=rate,
            decode_step_seconds=step,
            running_requests=running,
            kv_used_tokens=used,
        )
        fit = fit.learn(fleet(p_load=told, d_load=told), traffic(1.0), fresh_seconds=5.0)
        ratio = fit.timing.decode.seconds(10, 1000) / TIMING.decode.seconds(10, 1000)

        assert 1 / 5000 < ratio < 5000
        assert len(fit.decodes.by_size) <= 64
