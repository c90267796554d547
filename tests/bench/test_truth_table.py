"""What was measured beside what was simulated: figures, how far they are apart, and their tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "planner"


@pytest.fixture(scope="module")
def truth_table():
    """The script, which is no part of a package."""
    before, sys.path[:] = list(sys.path), [str(FOLDER), *sys.path]
    try:
        spec = importlib.util.spec_from_file_location("truth_table", FOLDER / "truth_table.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before


def request(ttft=1.0, tpot=0.05, status="ok", **stages):
    return {"status": status, "ttft": ttft, "tpot": tpot, "stages": stages}


def test_percentiles_are_of_those_that_were_answered(truth_table):
    made = [request(ttft=float(number), transfer=0.1) for number in range(1, 102)]
    figures = truth_table.figures([*made, request(ttft=None, tpot=None, status="failed")], ttft=51.0, tpot=0.1)
    assert figures["seconds"]["ttft"] == pytest.approx({"p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0})
    assert figures["seconds"]["transfer"]["p50"] == pytest.approx(0.1)
    assert figures["seconds"]["bind"] == {"p50": None, "p90": None, "p95": None, "p99": None}


def test_attainment_is_a_share_of_all_requests(truth_table):
    made = [request(), request(ttft=3.0), request(tpot=0.2), request(tpot=None), request(status="failed")]
    figures = truth_table.figures(made, ttft=2.0, tpot=0.1)
    assert figures["ok"] == 4
    assert figures["attainment"] == pytest.approx({"both": 2 / 5, "ttft": 3 / 5, "tpot": 3 / 5})


def test_figures_are_set_against_the_real_ones(truth_table):
    real, simulated = (truth_table.figures([request(ttft=ttft, queue=0.0)], ttft=2.0, tpot=0.1) for ttft in (2.0, 1.9))
    both = truth_table.beside(real, simulated)
    assert both["seconds"]["ttft"]["p50"] == pytest.approx({"real": 2.0, "simulated": 1.9, "off": -0.05})
    assert both["seconds"]["queue"]["p50"]["off"] is None
    assert both["attainment"]["both"] == {"real": 1.0, "simulated": 1.0}


def test_a_handover_is_what_is_left_without_any_load(truth_table):
    alone = [(tokens, 0.01, 0.01 + 0.03 + 1e-5 * tokens) for tokens in (64.0, 512.0, 1024.0)]
    found = truth_table.handover(alone)
    assert found == pytest.approx({"hop_seconds": 0.005, "base_seconds": 0.03, "seconds_per_token": 1e-5})
    shrinking = truth_table.handover([(64.0, 0.01, 0.05), (1024.0, 0.01, 0.04), (512.0, 0.01, 0.045)])
    assert shrinking == pytest.approx({"hop_seconds": 0.005, "base_seconds": 0.035, "seconds_per_token": 0.0})


def test_only_decisions_that_change_a_count_are_kept(truth_table):
    one, two = {"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 1}
    made = [{"at": float(at), "desired": counts} for at, counts in enumerate((one, one, two, two, one))]
    assert [each["at"] for each in truth_table.changes(made)] == [0.0, 2.0, 4.0]


def test_results_are_read_back_as_they_were_with_a_request_in_a_line(truth_table, tmp_path):
    results = {"static": {"real": {"requests": [request(), request(ttft=None)], "before": [], "pace": "x"}, "off": 0.5}}
    truth_table.write(tmp_path / "truth.json", results)
    text = (tmp_path / "truth.json").read_text()
    assert json.loads(text) == results
    assert sum('"ttft"' in line for line in text.splitlines()) == 2


def test_the_table_has_both_values_and_their_difference(truth_table, tmp_path, monkeypatch):
    monkeypatch.setattr(truth_table.store, "RESULTS", tmp_path)
    assert truth_table.table() == ["Not measured yet."]
    figures = truth_table.beside(
        truth_table.figures([request(ttft=1.0)], ttft=2.0, tpot=0.1),
        truth_table.figures([request(ttft=1.08)], ttft=2.0, tpot=0.1),
    )
    decisions = [{"at": 12.4, "desired": {"prefill": 2, "decode": 1}, "reason": "ScaledUp"}]
    sides = {side: {"decisions": decisions} for side in ("real", "simulated")}
    (tmp_path / "truth.json").write_text(json.dumps({"static": {"figures": figures, **sides}}))
    text = "\n".join(truth_table.table())
    assert "| static | TTFT | 1000 / 1080 ms (+8 %) |" in text
    assert "2 + 1 at 12 s" in text
