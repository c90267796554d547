"""What a simulation is offered: ramps, parts of traces, and what is wrong with them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.bench.arrivals import Arrivals
from kllm.bench.exceptions import OptionError
from kllm.bench.lengths import Fixed
from kllm.sim.laws.base import Pool
from kllm.sim.offered import Part, Step, of_ramp, of_trace, parse_ramp, parse_window
from kllm.sim.scenario import Failure, Failures
from kllm.sim.texts import knobs_of, parse_failures, parse_policies


def ramp(text, *, kind=Arrivals.POISSON, seed=0):
    return of_ramp(parse_ramp(text), kind=kind, inputs=Fixed(10), outputs=Fixed(5), seed=seed)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    rows = [f"{at},{100 + at},{10 + at}" for at in range(10)]
    file.write_text("\n".join(["timestamp,input_length,output_length", *rows]) + "\n")

    def offered(*, inputs=None, **part):
        return of_trace(file, Part(**part), inputs=inputs, outputs=None, seed=0)

    offered.file = file
    return offered


def test_a_ramp_is_read():
    assert parse_ramp("2:330, 4.5:360") == (Step(2, 330), Step(4.5, 360))


@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=6), seed=st.integers(0, 9)
)
def test_even_arrivals_of_a_ramp_keep_each_steps_rate_and_pauses_have_none(steps, seed):
    if not any(rate for rate, _ in steps):
        return
    made = ramp(",".join(f"{rate}:{seconds}" for rate, seconds in steps), kind=Arrivals.CONSTANT, seed=seed)
    assert made.seconds == sum(seconds for _, seconds in steps)
    begins = [0, *itertools.accumulate(seconds for _, seconds in steps)]
    for (rate, seconds), begin in zip(steps, begins, strict=False):
        assert sum(begin <= each.at < begin + seconds for each in made.requests) == rate * seconds
    assert [each.at for each in made.requests] == sorted(each.at for each in made.requests)


def test_chance_arrivals_of_a_ramp_follow_its_rates():
    made = ramp("2:1000,8:1000")
    early = sum(each.at < 1000 for each in made.requests)
    assert early == pytest.approx(2000, rel=0.1)
    assert len(made.requests) - early == pytest.approx(8000, rel=0.05)


def test_a_window_begins_at_zero_and_ends_with_its_end(trace):
    made = trace(begin=3, end=6)
    assert [(each.at, each.input_tokens) for each in made.requests] == [(0, 103), (1, 104), (2, 105)]
    assert made.seconds == 3
    assert trace(begin=7).seconds == 2
    assert parse_window("600:") == (600, math.inf)
    assert parse_window(":600") == (0, 600)


@pytest.mark.parametrize("text", ["", "5", "6:5", "5:5", "-1:5", "a:b", "nan:5"])
def test_what_is_no_window_is_refused(text):
    with pytest.raises(OptionError, match="--window"):
        parse_window(text)


def test_a_window_past_the_end_is_told_with_where_that_is(trace):
    with pytest.raises(OptionError, match="the last one comes at 9 s"):
        trace(begin=100)


def test_a_trace_is_sped_up_without_a_change_of_its_requests(trace):
    made = trace(speed=2)
    assert [each.at for each in made.requests] == [at / 2 for at in range(10)]
    assert made.seconds == 4.5


@settings(deadline=None, max_examples=25)
@given(scale=st.floats(0.3, 4))
def test_another_rate_keeps_the_time_and_the_share_that_caches_can_spare(tmp_path_factory, scale):
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        f'{{"timestamp": {100 * n}, "input_length": 600, "output_length": 5, "hash_ids": [0, {n}]}}\n'
        for n in range(400)
    ]
    file.write_text("".join(rows))
    made = of_trace(file, Part(scale=scale), inputs=None, outputs=None, seed=1)
    assert len(made.requests) == pytest.approx(400 * scale, rel=0.25)
    assert made.seconds == pytest.approx(39.9)
    times = [each.at for each in made.requests]
    assert times == sorted(times)
    # No two requests share a whole prompt, and copies begin like those of their own round only.
    assert len({each.blocks for each in made.requests}) == len(made.requests)
    assert len({each.blocks[0] for each in made.requests}) <= math.ceil(scale)


def test_a_pause_in_a_trace_is_told_with_its_line_and_stays(trace):
    with trace.file.open("a") as file:
        file.write("5000,1,1\n")
    made = trace()
    assert made.requests[-1].at == 5000
    assert made.notes == (
        "line 12: nothing arrives for 4991 s before it (from 9 s of the trace); the pause is simulated as it stands",
    )


def test_times_that_run_backwards_are_refused_with_the_line(trace):
    with trace.file.open("a") as file:
        file.write("8.5,1,1\n")
    with pytest.raises(OptionError, match=r"--trace: .*line 12: time runs backwards, by 0\.5 s from line 11"):
        trace()


def test_lengths_that_are_drawn_take_a_traces_place(trace):
    assert {each.input_tokens for each in trace(inputs=Fixed(7)).requests} == {7}


def test_requests_that_no_engine_can_hold_are_told(trace):
    made = trace()
    assert made.too_long(128) is None
    assert made.too_long(122).startswith("3 of 10 requests do not fit into the engines' 122 tokens of KV")


def test_failures_are_read():
    assert parse_failures("0.5,decode@600,prefill@30") == Failures(
        0.5, (Failure(30, Pool.PREFILL), Failure(600, Pool.DECODE))
    )


def test_settings_reach_the_policies_they_are_for():
    texts = ("a=1", "hpa.b-c=2", "slo.d=3")
    assert knobs_of(texts, "hpa") == {"a": "1", "b_c": "2"}
    assert knobs_of(texts, "static:1,2") == {"a": "1"}


def test_policies_keep_their_counts():
    assert parse_policies("slo,static:2,3, static:4 ,hpa") == ["slo", "static:2,3", "static:4", "hpa"]


def test_a_trace_that_lasts_for_ages_is_refused_with_its_line(trace):
    with trace.file.open("a") as file:
        file.write("1e300,10,5\n")
    with pytest.raises(OptionError, match=r"--window: .* line 12 comes at 1e\+300 s"):
        trace()
    assert len(trace(end=100).requests) == 10
