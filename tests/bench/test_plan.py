"""Arrivals, lengths, traces and prompts."""

from __future__ import annotations

import gzip
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.bench.arrivals import Arrivals, arrivals
from kllm.bench.lengths import MAX_TOKENS, Fixed, LogNormal, Uniform, parse_lengths
from kllm.bench.plan import Planned, plan_of_arrivals, plan_of_trace
from kllm.bench.prompts import Calibration, Prompts, words
from kllm.bench.trace import Recorded, TraceError, parse_trace, read_trace, spread

seeds = st.integers(0, 2**32)


@given(rate=st.floats(0.01, 200), duration=st.floats(0.1, 20), seed=seeds, kind=st.sampled_from(Arrivals))
def test_arrivals_are_sorted_within_the_duration_and_the_same_again(rate, duration, seed, kind):
    first, second = (
        arrivals(kind, rate=rate, duration=duration, rng=np.random.default_rng(seed)) for _ in range(2)
    )  # fmt: skip
    assert first == second == sorted(first)
    assert all(0 <= at < duration for at in first)


@given(rate=st.floats(0.1, 50), duration=st.floats(0.1, 20), seed=seeds)
def test_another_rate_stretches_the_same_arrivals_and_a_longer_duration_adds_to_them(rate, duration, seed):
    times, stretched, longer = (
        arrivals(Arrivals.POISSON, rate=rate * scale, duration=seconds, rng=np.random.default_rng(seed))
        for scale, seconds in ((1, duration), (0.5, duration * 2), (1, duration * 2))
    )
    assert longer[: len(times)] == times
    assert stretched == pytest.approx([at * 2 for at in times])


def test_constant_arrivals_keep_one_gap():
    times = arrivals(Arrivals.CONSTANT, rate=4, duration=2.5, rng=np.random.default_rng(0))
    assert times == [index / 4 for index in range(10)]


def test_constant_arrivals_gain_none_from_rounding():
    assert len(arrivals(Arrivals.CONSTANT, rate=0.1, duration=30, rng=np.random.default_rng(0))) == 3


def test_poisson_arrivals_have_exponential_gaps():
    times = arrivals(Arrivals.POISSON, rate=50, duration=400, rng=np.random.default_rng(1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.03)
    assert np.mean(gaps > 1 / 50) == pytest.approx(math.exp(-1), abs=0.02)


def test_lengths_are_read():
    assert parse_lengths("512") == Fixed(512)
    assert parse_lengths("uniform:100-900") == Uniform(100, 900)
    assert parse_lengths("lognormal:512:0.6") == LogNormal(512, 0.6)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "uniform", "uniform:9-3", "uniform:0-3", "lognormal:512", "lognormal:nan:1",
     "lognormal:512:inf", "lognormal:512:-1", "normal:1:2", "99999999"],
)  # fmt: skip
def test_other_lengths_are_refused_with_what_to_use(text):
    with pytest.raises(ValueError, match="use "):
        parse_lengths(text)


@given(
    text=st.one_of(
        st.integers(1, MAX_TOKENS).map(str),
        st.tuples(st.integers(1, 900), st.integers(900, MAX_TOKENS)).map(lambda pair: f"uniform:{pair[0]}-{pair[1]}"),
        st.tuples(st.floats(1, MAX_TOKENS), st.floats(0, 5)).map(lambda pair: f"lognormal:{pair[0]}:{pair[1]}"),
    ),
    seed=seeds,
)
def test_drawn_lengths_stay_in_bounds(text, seed):
    drawn = parse_lengths(text).draw(50, np.random.default_rng(seed))
    assert len(drawn) == 50
    assert all(1 <= tokens <= MAX_TOKENS for tokens in drawn)


def test_lognormal_lengths_have_their_median_and_spread():
    drawn = np.array(LogNormal(512, 0.6).draw(20_000, np.random.default_rng(2)))
    assert np.median(drawn) == pytest.approx(512, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.6, rel=0.03)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,0,8\n"
)
SERVEGEN = "timestamp,client,input_length,output_length\n5.000,23,227,617\n5.250,37,367,343\n"
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 800, "output_length": 6, "hash_ids": [0, 2]}\n'
    '{"timestamp": 6000, "input_length": 10, "output_length": 7, "hash_ids": [3]}\n'
)


def test_an_azure_trace_begins_at_zero_and_has_no_empty_prompts():
    assert parse_trace(AZURE.splitlines(keepends=True)) == [Recorded(0, 4808, 10), Recorded(0.5, 1, 8)]


def test_a_servegen_trace_is_read_past_its_clients():
    assert parse_trace(SERVEGEN.splitlines(keepends=True)) == [Recorded(0, 227, 617), Recorded(0.25, 367, 343)]


def test_a_mooncake_trace_keeps_blocks_and_is_spread_inside_its_bins():
    assert parse_trace(MOONCAKE.splitlines(keepends=True)) == [
        Recorded(0, 700, 5, (0, 1)), Recorded(1.5, 800, 6, (0, 2)), Recorded(3, 10, 7, (3,)),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 20), min_size=1).map(sorted))
def test_spreading_keeps_the_order_and_moves_nothing_into_the_next_bin(bins):
    before = [Recorded(3.0 * at, 1, 1) for at in bins]
    after = spread(before)
    assert [request.at for request in after] == sorted(request.at for request in after)
    assert all(old.at <= new.at < old.at + 60.1 for old, new in zip(before, after, strict=True))
    if len(set(bins)) > 1:
        width = min(later - earlier for earlier, later in itertools.pairwise(sorted(set(bins)))) * 3.0
        assert all(new.at < old.at + width for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("content", [AZURE, SERVEGEN, MOONCAKE])
def test_a_trace_is_read_plain_and_gzipped_and_up_to_a_limit(tmp_path: Path, content):
    plain, zipped = tmp_path / "trace", tmp_path / "trace.gz"
    plain.write_text(content)
    zipped.write_bytes(gzip.compress(content.encode()))
    assert read_trace(plain) == read_trace(zipped)
    assert len(read_trace(plain, limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"a,b,c\n1,2,3\n", "neither a JSON object nor a header"),
        (b"timestamp,input_length,output_length\n", "holds no requests"),
        (b"timestamp,input_length,output_length\n1,2,3\n1,x,3\n", "line 3 is no request"),
        (b"timestamp,input_length,output_length\nnan,2,3\n", "line 2 is no request"),
        (b"timestamp,input_length,output_length\n1,2\n", "line 2 is no request.*2 columns, and the header has 3"),
        (b"timestamp,input_length,output_length\n1,2,3,4\n", "line 2 is no request.*4 columns"),
        (b"timestamp,input_length,output_length\n1,2,-3\n", "line 2 is no request.*negative number of tokens, -3"),
        (b"timestamp,input_length,output_length\n1,2,9999999\n", "line 2 is no request.*more than 1000000"),
        (b'{"timestamp": 1}\n', "line 1 is no Mooncake request"),
        (b'{"timestamp": 1, "input_length": Infinity, "output_length": 2}\n', "line 1 is no Mooncake request"),
        (b'{"timestamp": 1, "input_length": 3.7, "output_length": 2}\n', "line 1 .*3.7 is no number of tokens"),
        (b'{"timestamp": 1, "input_length": true, "output_length": 2}\n', "line 1 .*True is no number of tokens"),
        (MOONCAKE.encode() + b'{"a":' + b"[" * 100_000 + b"\n", "line 4 is no Mooncake request"),
        (b"timestamp,input_length,input_length,output_length\n1,2,3,4\n", "line 1 has several columns input_length"),
        (MOONCAKE.encode() + b" " * (17 << 20), "line 4 has more than 16777216 characters"),
        (MOONCAKE.encode() + b"[]\n", "line 4 is no Mooncake request"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, content, message):
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "trace")


def test_a_trace_is_read_from_a_pipe_from_its_first_line_on(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as writer:
        writer.submit((tmp_path / "pipe").write_text, MOONCAKE)
        assert read_trace(tmp_path / "pipe") == parse_trace(MOONCAKE.splitlines(keepends=True))


def test_times_that_run_backwards_are_sorted_or_refused_with_the_line():
    lines = ["timestamp,input_length,output_length\n", "5,2,3\n", "\n", "4.5,7,8\n"]
    assert parse_trace(lines) == [Recorded(0, 7, 8), Recorded(0.5, 2, 3)]
    with pytest.raises(TraceError, match=r"line 4: time runs backwards, by 0\.5 s from line 2"):
        parse_trace(lines, ordered=True)


def test_a_trace_is_sped_up_and_cut():
    recorded = [Recorded(0, 5, 6, (1,)), Recorded(10, 7, 8), Recorded(20, 9, 10)]
    assert plan_of_trace(recorded, speed=2, duration=10) == [Planned(0, 0, 5, 6, (1,)), Planned(1, 5, 7, 8)]


def test_drawn_lengths_replace_those_of_a_trace_and_its_blocks():
    recorded = [Recorded(0, 5, 6, (1,))]
    assert plan_of_trace(recorded, inputs=Fixed(50)) == [Planned(0, 0, 50, 6)]
    assert plan_of_trace(recorded, outputs=Fixed(60)) == [Planned(0, 0, 5, 60, (1,))]


def test_another_distribution_of_answers_leaves_the_prompts_lengths_alone():
    times = [0.0, 1.0, 2.0]
    one, other = (
        plan_of_arrivals(times, inputs=Uniform(1, 1000), outputs=outputs, seed=3)
        for outputs in (Fixed(5), Uniform(1, 99))
    )
    assert [request.input_tokens for request in one] == [request.input_tokens for request in other]


@given(characters=st.integers(0, 3000), seed=seeds)
def test_words_fill_their_length_and_end_with_none_of_the_spaces(characters, seed):
    text = words(characters, np.random.default_rng(seed))
    assert len(text) == characters
    assert not text.endswith(" ")


@given(short=st.integers(1, 30), more=st.integers(1, 500), tokens=st.integers(1, 10_000))
def test_calibration_returns_what_was_measured(short, more, tokens):
    calibration = Calibration.of((80, short), (640, short + more))
    counted = calibration.overhead_tokens + calibration.characters(tokens) / calibration.characters_per_token
    assert calibration.is_measured
    if tokens > calibration.overhead_tokens + 1 / calibration.characters_per_token:
        assert counted == pytest.approx(tokens, abs=0.51 / calibration.characters_per_token + 1e-6)


def test_a_server_that_counts_nothing_is_guessed():
    assert Calibration.of((80, 5), (640, 5)) == Calibration.guess()


def test_prompts_are_the_same_for_a_seed_and_differ_from_each_other():
    calibration = Calibration(5, 3)
    plan = [Planned(index, 0, 100, 1) for index in range(20)]
    made = [Prompts(calibration, seed=1).prompt(planned) for planned in plan]
    assert made == [Prompts(calibration, seed=1).prompt(planned) for planned in plan]
    assert len({prompt[:30] for prompt in made}) == 20
    assert made[0] != Prompts(calibration, seed=2).prompt(plan[0])
    assert {len(prompt) for prompt in made} == {485}


def test_equal_blocks_begin_equal_prompts():
    prompts = Prompts(Calibration(4, 0), seed=1)
    first, second = (prompts.prompt(Planned(index, 0, 1400, 1, (7, 8, 9 + index))) for index in range(2))
    assert len(first) == len(second) == 5600
    assert first[:4096] == second[:4096]
    assert first[4096:4200] != second[4096:4200]
