"""The timing model's forms, against their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming, parse_timing

seconds = st.floats(0, 1e-2)
tokens = st.integers(0, 100_000)


@given(seconds, seconds, seconds, st.integers(1, 100_000), tokens)
def test_prefill_is_a_plus_bn_plus_kn_of_n_plus_2c(a, b, k, new, cached):
    expected = a + b * new + k * new * (new + 2 * cached)

    assert math.isclose(PrefillTiming(a, b, k).seconds(new, cached), expected, rel_tol=1e-9)


def test_a_batch_pays_the_step_once():
    timing = PrefillTiming(a=1.0, b=0.1, k=0.001)

    assert timing.batch_seconds([(10, 0), (10, 5)]) == pytest.approx(1.0 + 2.0 + 0.001 * (100 + 10 * 20))


def test_computing_in_chunks_costs_the_same_attention_as_at_once():
    timing = PrefillTiming(a=0.0, b=0.1, k=0.001)

    assert timing.seconds(50) + timing.seconds(50, 50) == pytest.approx(timing.seconds(100))


def test_nothing_to_compute_takes_no_time():
    assert PrefillTiming(1.0, 1.0, 1.0).batch_seconds([(0, 100)]) == 0.0
    assert DecodeTiming(1.0, 1.0, 1.0).seconds(0, 100) == 0.0


@given(tokens, st.integers(1, 8192))
def test_draining_more_tokens_never_takes_less_time(queued, chunk):
    timing = PrefillTiming(0.01, 1e-4, 1e-9)

    assert timing.drain_seconds(queued + 1, chunk_tokens=chunk) >= timing.drain_seconds(queued, chunk_tokens=chunk)


def test_decode_is_a_plus_b_batch_plus_c_kv_over_accept_length():
    timing = DecodeTiming(a=0.01, b=0.001, c=1e-6)

    assert timing.seconds(4, 1000) == pytest.approx(0.01 + 0.004 + 0.001)
    assert timing.tpot_seconds(4, 1000, accept_length=2.0) == pytest.approx(0.0075)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_coefficients_must_be_finite_and_not_negative(value):
    with pytest.raises(ValueError, match="finite"):
        PrefillTiming(value, 0.0, 0.0)
    with pytest.raises(ValueError, match="finite"):
        DecodeTiming(0.0, value, 0.0)


def test_a_timing_is_read_out_of_an_engines_file():
    text = '{"prefill": {"a": 1, "b": 2, "k": 3}, "decode": {"a": 4, "b": 5, "c": 6}, "kv_tokens": 7}'
    assert parse_timing(text) == EngineTiming(PrefillTiming(1, 2, 3), DecodeTiming(4, 5, 6))


NO_TIMINGS = ["", "[]", "{}", '{"prefill": {"a": 1, "b": 2, "k": 3}}', '{"prefill": 1, "decode": 1}']


@pytest.mark.parametrize("text", NO_TIMINGS)
def test_what_is_no_timing_is_refused_with_what_is(text):
    with pytest.raises(ValueError, match=r"prefill \{a, b, k\} and decode \{a, b, c\}"):
        parse_timing(text)


def test_a_timing_has_no_coefficient_that_is_no_number():
    with pytest.raises(ValueError, match="b must be a finite number"):
        parse_timing('{"prefill": {"a": 1, "b": NaN, "k": 3}, "decode": {"a": 4, "b": 5, "c": 6}}')
