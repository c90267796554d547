"""`kllm explain` argues decisions from what was told of them."""

from __future__ import annotations

import json

import pytest
from plan.plan_helpers import fleet, limits, model, traffic
from typer.testing import CliRunner

from kllm.argument import Account, argued
from kllm.main import app
from kllm_operator.loop.account import why_document
from kllm_operator.plan.planner import PlannerState, plan


def decided(prefill=1, decode=1, *, rate=1.0, most=8, budget=None):
    seen = model(fleet(prefill, decode), traffic(rate))
    return plan(seen, now=0.0, limits=limits(budget, most=most), state=PlannerState())


def account(made, **changes):
    desired = made.desired
    return Account(
        "chat", {"prefill": desired.prefill, "decode": desired.decode}, desired.reason, desired.message,
        why=json.loads(json.dumps(why_document(made.why))), **changes,
    )  # fmt: skip


def told(*args, **kwargs):
    return "\n".join(argued(account(*args, **kwargs)))


def test_a_count_that_grows_is_argued_with_the_load_that_it_would_have_had_and_will_have():
    made = decided(rate=30.0)
    text = told(made)
    more = made.desired.prefill
    assert more > 1
    role = made.why.of(made.why.roles[0].role)
    assert "wanted are prefill" in text
    assert "(ScaledUp: demand ahead needs more)" in text
    assert f"Prefill goes from 1 to {more}." in text
    assert "waiting for prefill and the prefill itself, over prefill's part of the TTFT objective" in text
    assert f"With {more} it is {role.forecast(more).load.value:.2f}" in text
    assert f"One more, {more + 1}, would leave {role.forecast(more + 1).load.value:.2f}" in text


def test_a_count_that_is_needed_and_not_allowed_says_so():
    made = decided(rate=60.0, most=2)
    needs = made.why.roles[0].needs
    assert needs > 2
    text = told(made)
    assert "(MaxReplicasReached: more are needed than maxReplicas allows)" in text
    assert f"{needs} are needed, which bounds or budget do not allow" in text


def test_a_count_that_stays_says_why_none_goes():
    text = told(decided(2, 1, rate=12.0))
    assert "Prefill stays at 2." in text
    assert "One fewer, 1, would leave" in text


def test_what_is_unknown_is_called_so():
    made = plan(model(fleet(1, 1), traffic(None)), now=0.0, limits=limits(), state=PlannerState())
    assert "the unknown takes nothing away" in told(made)


def test_advice_pauses_and_waiting_are_told():
    made = decided()
    text = told(made, advice=True, paused=True, waits_for="an instance starts (WaitingForStart)")
    assert "the planner would have prefill 1" in text
    assert "this is advice" in text
    assert "It is paused" in text
    assert text.endswith("It waits for this: an instance starts (WaitingForStart)")


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *arguments])


def moment(at, serving, starting=0):
    return {
        "at_seconds": at, "serving": {"one": serving}, "starting": {"one": starting}, "draining": {"one": 0},
        "queued": {"one": 3},
    }  # fmt: skip


def decision(at, count):
    return {
        "at_seconds": at, "desired": {"one": count}, "serving": {"one": 1}, "reason": "Target", "message": f"{count}!",
    }  # fmt: skip


@pytest.fixture
def outcome(tmp_path):
    file = tmp_path / "outcome.json"
    document = {
        "policy": "hpa",
        "decisions": [decision(0.0, 1), decision(60.0, 3)],
        "series": [moment(0.0, 1), moment(70.0, 1, starting=2), moment(90.0, 3)],
    }
    file.write_text(json.dumps(document))
    return str(file)


def test_a_simulation_is_explained_at_any_time(outcome):
    early = run("--outcome", outcome, "--at", "59").stdout
    assert early.startswith("hpa at 59 s, as decided at 0 s: wanted are one 1 (Target)")
    later = run("--outcome", outcome, "--at", "75").stdout
    assert "wanted are one 3" in later
    assert "serving were one 1; on their way one 2; waiting requests one 3" in later
    assert "It waits for this: 2 one on their way" in later
    assert run("--outcome", outcome).stdout.startswith("hpa at 60 s: wanted are one 3")


def test_of_several_simulations_one_is_chosen(outcome, tmp_path):
    document = json.loads((tmp_path / "outcome.json").read_text())
    file = tmp_path / "outcomes.json"
    file.write_text(json.dumps([document, {**document, "policy": "slo"}]))
    result = run("--outcome", str(file))
    assert (result.exit_code, result.stderr) == (2, "kllm: it holds hpa, slo; choose one with --policy\n")
    assert run("--outcome", str(file), "--policy", "slo").stdout.startswith("slo at 60 s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "choose one"),
        ("{}", "this is not what `kllm simulate --json` writes"),
        ('{"decisions": [], "policy": "x", "series": []}', "nothing was decided by then, ever"),
        ('{"decisions": [{"at_seconds": 5}], "policy": "x", "series": []}', "has another shape than expected"),
    ],
)
def test_what_is_no_outcome_is_told(text, message, tmp_path):
    file = tmp_path / "outcome.json"
    file.write_text(text)
    result = run("--outcome", str(file))
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_time_goes_with_an_outcome_and_a_service_must_be_up(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "--at and --policy go with --outcome" in run("--at", "5").stderr
    result = run()
    assert result.exit_code == 2
    assert "nothing is up on this machine" in result.stderr
