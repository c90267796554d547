"""Rows of decode steps in closed form."""

import pytest
from engine_model.engines import TIMING
from hypothesis import given
from hypothesis import strategies as st

from kllm_core.engine_model.decoding import DecodeRun

runs = st.builds(
    lambda batch, kv, accept: DecodeRun.of(TIMING.decode, at=3.0, batch=batch, kv_tokens=kv, accept_length=accept),
    st.integers(1, 256),
    st.integers(0, 700_000),
    st.floats(1.0, 4.0),
)


def stepped(run, steps):
    """The ends of steps, one by one, from the timing of a single step."""
    at, kv, ends = run.at, run.kv_tokens, []
    for _ in range(steps):
        at += TIMING.decode.a + TIMING.decode.b * run.batch + TIMING.decode.c * kv
        kv += run.growth
        ends.append(at)
    return ends


@given(runs, st.integers(1, 400))
def test_the_closed_form_is_the_sum_of_single_steps(run, steps):
    ends = stepped(run, steps)
    assert run.ends(steps) == pytest.approx(ends[-1], rel=1e-12)
    assert run.ends(0) == run.at


@given(runs, st.floats(0.0, 20.0))
def test_steps_before_a_moment_are_those_that_are_over(run, elapsed):
    moment = run.at + elapsed
    steps = run.steps_before(moment)
    assert run.ends(steps) <= moment + 1e-8
    assert run.ends(steps + 1) > moment - 1e-8


@given(runs, st.integers(0, 300))
def test_the_end_of_a_step_is_its_own_boundary(run, steps):
    end = run.ends(steps)
    assert run.boundary(end) == steps
    assert run.boundary(end + 1e-4) == steps + 1
    assert run.steps_before(end) == steps
