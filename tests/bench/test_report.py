"""Rows, attainment, the report and its picture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.bench import plot
from kllm.bench.attainment import Goals, attainment
from kllm.bench.exceptions import OptionError
from kllm.bench.report import figures, summarize, text_of
from kllm.bench.row import Row, Status


def answered(index: int = 0, *, ttft: float = 0.1, tpot: float = 0.01, tokens: int = 11) -> Row:
    row = Row(index, scheduled=1.0, input_tokens=100, output_tokens=tokens, status=Status.OK)
    row.sent = 1.001
    row.first = row.sent + ttft
    row.last = row.first + tpot * (tokens - 1)
    row.ended = row.last
    row.prompt_tokens, row.completion_tokens = 100, tokens
    return row


def ended(status: Status, error: str | None = None) -> Row:
    return Row(9, 1.0, 100, 11, status=status, error=error)


def test_a_row_measures_from_sending_and_divides_by_the_gaps():
    row = answered(ttft=0.2, tpot=0.03)
    assert (row.ttft, row.tpot, row.e2e, row.lag) == tuple(map(pytest.approx, (0.2, 0.03, 0.5, 0.001)))


def test_one_token_has_no_time_per_token_and_none_to_miss():
    row = answered(tokens=1)
    assert row.tpot is None
    assert Goals(ttft_ms=150, tpot_ms=1).meets(row)


@pytest.mark.parametrize(
    ("ttft", "tpot", "is_met"),
    [(0.1, 0.01, True), (0.3, 0.01, False), (0.1, 0.05, False), (0.3, 0.05, False)],
)
def test_both_objectives_must_be_met(ttft, tpot, is_met):
    assert Goals(ttft_ms=200, tpot_ms=20).meets(answered(ttft=ttft, tpot=tpot)) is is_met


def test_one_objective_alone_is_enough_to_be_judged():
    assert attainment([answered(ttft=9), answered()], Goals(tpot_ms=20)) == 1
    assert attainment([answered(ttft=9), answered()], Goals(ttft_ms=200)) == 0.5
    assert attainment([answered()], Goals()) is None


@pytest.mark.parametrize("status", [Status.FAILED, Status.REJECTED, Status.UNFINISHED])
def test_whatever_was_not_answered_is_missed(status):
    assert attainment([answered(), ended(status)], Goals(ttft_ms=1000, tpot_ms=1000)) == 0.5


@given(st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_rise_and_lie_within_the_values(values):
    found = figures(values)
    ordered = [found[name] for name in ("p50", "p90", "p95", "p99", "max")]
    assert ordered == sorted(ordered)
    assert min(values) * 1000 - 0.001 <= ordered[0]


def test_percentiles_are_interpolated_over_those_known():
    found = figures([None, *(index / 1000 for index in range(101))])
    assert {name: found[name] for name in ("p50", "p90", "p95", "p99")} == {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert figures([None]) == {}


def test_a_summary_counts_every_request_once():
    rows = [
        answered(), answered(ttft=5), ended(Status.FAILED, "http_503"), ended(Status.FAILED, "timeout"),
        ended(Status.FAILED, "http_503"), ended(Status.REJECTED), ended(Status.UNFINISHED),
    ]  # fmt: skip
    summary = summarize(rows, planned=8, elapsed=10, goals=Goals(1000, 20), is_interrupted=False)
    assert (summary.ok, summary.failed, summary.rejected, summary.unfinished) == (2, 3, 1, 1)
    assert summary.requests == 7
    assert summary.errors == {"http_503": 2, "timeout": 1}
    assert (summary.met, summary.attainment) == (1, pytest.approx(1 / 7))
    assert (summary.requests_per_second, summary.completion_tokens_per_second) == (0.2, 2.2)
    assert summary.goodput_per_second == 0.1


def test_the_text_tells_what_a_reader_must_know():
    wrong = answered()
    wrong.completion_tokens = 3
    wrong.prompt_tokens = 200
    wrong.sent = 2.0
    goals = Goals(1000, 20)
    rows = [wrong, ended(Status.FAILED, "http_503")]
    summary = summarize(rows, planned=5, elapsed=10, goals=goals, is_interrupted=True)
    text = text_of(summary, title="m at u", goals=goals)
    for part in (
        "m at u: 2 of 5 requests in 10.0 s, interrupted", "errors: http_503 1", "of 2 met TTFT <= 1000 ms and TPOT",
        "1 answers had another length", "2.00 times the tokens", "this client sent late",
    ):  # fmt: skip
        assert part in text


def test_a_run_without_answers_has_no_table():
    summary = summarize([], planned=5, elapsed=0, goals=Goals(), is_interrupted=True)
    text = text_of(summary, title="m at u", goals=Goals())
    assert text.splitlines() == [
        "m at u: 0 of 5 requests in 0.0 s, interrupted", "ok 0  failed 0  rejected 0  unfinished 0",
    ]  # fmt: skip


def test_a_picture_without_matplotlib_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"--plot: .*pip install 'kllm\[plot\]'"):
        plot.check_plot(tmp_path / "picture.png")


def test_a_picture_must_be_a_png(tmp_path):
    with pytest.raises(OptionError, match=r"must end with \.png"):
        plot.check_plot(tmp_path / "picture.jpg")
