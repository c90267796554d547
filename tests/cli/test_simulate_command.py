"""`kllm simulate`, from the command line to its files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from kllm.main import app
from kllm.sim.laws.registry import POLICIES
from kllm.sim.progress import Progress

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "outcome.schema.json").read_text())
SERVICE = """
apiVersion: kllm.io/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "demo://smollm2-135m", name: smollm2}
  objectives: {ttftMilliseconds: 3000, tpotMilliseconds: 100, percentile: 90}
  prefill: {minReplicas: 1, maxReplicas: 4}
  decode: {minReplicas: 1, maxReplicas: 4}
"""
RAMP = ("--ramp", "1:20,3:20", "--isl", "1000", "--osl", "40", "--engine", "qwen3-8b-h200", "--start-seconds", "5")


@pytest.fixture
def service(tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE)
    return str(file)


def run(*arguments: str, code: int = 0):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def outcome(tmp_path: Path, *arguments: str, code: int = 0):
    file = tmp_path / "outcome.json"
    run(*arguments, "--json", str(file), code=code)
    return json.loads(file.read_text())


@pytest.mark.parametrize("policy", ["static:1,2", "hpa"])
def test_an_outcome_is_told_as_text_and_as_a_document_that_fits_its_schema(service, tmp_path, policy):
    file = tmp_path / "outcome.json"
    result = run(*RAMP, "-f", service, "--policy", policy, "--json", str(file))
    document = json.loads(file.read_text())
    jsonschema.validate(document, SCHEMA)
    requests = document["requests"]
    assert requests["arrived"] == requests["finished"] == document["load"]["requests"] > 40
    assert document["attainment"]["both"] == 1.0
    assert document["policy"] == policy
    assert "attainment 100.0% of all that arrived" in result.stdout


def test_prompts_are_computed_in_the_order_that_is_asked_for(service, tmp_path):
    long = ("--ramp", "2:20", "--isl", "uniform:500-20000", "--osl", "20")
    plain, fair = (
        outcome(tmp_path, *long, "-f", service, "--policy", "static:1,1", "--prefill-order", order)
        for order in ("fcfs", "fair")
    )
    assert fair["requests"] == plain["requests"]
    assert fair["ttft_seconds"]["p50"] < plain["ttft_seconds"]["p50"]


def test_static_counts_take_gpus_for_the_whole_time(service, tmp_path):
    document = outcome(tmp_path, *RAMP, "-f", service, "--policy", "static:1,2", "--price", "2,0.5")
    assert document["mean_replicas"] == {"prefill": 1, "decode": 2}
    assert document["gpu_seconds"] == pytest.approx(3 * document["simulated_seconds"], rel=1e-3)
    assert document["cost"] == pytest.approx(3 * document["simulated_seconds"], rel=1e-3)
    assert document["peak"] == 3


def test_costs_are_told_by_the_prices_of_the_manifest_unless_others_are_given(service, tmp_path):
    text = Path(service).read_text().replace("prefill: {", "prefill: {accelerator: {pricePerGpuHour: 6}, ")
    priced = tmp_path / "priced.yaml"
    priced.write_text(text)
    run = (*RAMP, "-f", str(priced), "--policy", "static:1,2")

    document = outcome(tmp_path, *run)
    assert document["cost"] == pytest.approx(8 * document["simulated_seconds"], rel=1e-3)
    document = outcome(tmp_path, *run, "--price", "1,1")
    assert document["cost"] == pytest.approx(3 * document["simulated_seconds"], rel=1e-3)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another(service, tmp_path):
    first, again, other = (
        outcome(tmp_path, *RAMP, "-f", service, "--policy", "hpa", "--seed", seed) for seed in ("1", "1", "2")
    )
    for each in (first, again, other):
        del each["speed"], each["arguments"], each["seed"]
    assert first == again != other


def test_one_pool_has_the_bounds_of_both_or_those_that_are_asked_for(service, tmp_path):
    arguments = (*RAMP, "-f", service, "--pool", "one", "--policy", "hpa")
    assert outcome(tmp_path, *arguments)["mean_replicas"] == {"one": 2}
    assert outcome(tmp_path, *arguments, "--bounds", "1:3")["mean_replicas"] == {"one": 1}


def test_policies_are_compared_in_processes_with_one_table_and_one_list(service, tmp_path):
    file = tmp_path / "outcomes.json"
    result = run("compare", "--policies", "static:1,2,hpa", *RAMP, "-f", service, "--json", str(file))
    documents = json.loads(file.read_text())
    assert [each["policy"] for each in documents] == ["static:1,2", "hpa"]
    for each in documents:
        jsonschema.validate(each, SCHEMA)
    assert documents[0]["attainment"] == outcome(tmp_path, *RAMP, "-f", service, "--policy", "static:1,2")["attainment"]
    lines = result.stdout.splitlines()
    assert "policy" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["static:1,2", "hpa"]


def test_what_was_simulated_before_an_interruption_is_kept(service, tmp_path, monkeypatch):
    told = Progress.update

    def interrupt(self, index, at_seconds, finished):
        told(self, index, at_seconds, finished)
        if at_seconds >= 100:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "update", interrupt)
    before = signal.getsignal(signal.SIGINT)
    arguments = ("--ramp", "5:4000", *RAMP[2:], "-f", service, "--policy", "static:2,2")
    document = outcome(tmp_path, *arguments, code=130)
    jsonschema.validate(document, SCHEMA)
    assert document["interrupted"]
    assert 100 <= document["simulated_seconds"] < 4000
    assert 0 < document["requests"]["arrived"] < document["load"]["requests"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_that_are_compared_and_keeps_what_they_had(service, tmp_path, monkeypatch, number):
    """Terminals and `timeout` send it to all processes, those of the simulations included."""
    told, sent = Progress.update, []

    def interrupt(self, index, at_seconds, finished):
        told(self, index, at_seconds, finished)
        if index == 1 and at_seconds > 0 and not sent:
            sent.append(number)
            for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
                os.kill(process.pid, number)

    monkeypatch.setattr(Progress, "update", interrupt)
    policies = ("compare", "--policies", "static:1,1,static:2,2,static:3,3", "--jobs", "2")
    documents = outcome(tmp_path, *policies, "--ramp", "2:20000", *RAMP[2:], "-f", service, code=130)
    assert [each["policy"] for each in documents] == ["static:1,1", "static:2,2"]
    for each in documents:
        assert each["interrupted"]
        assert each["simulated_seconds"] < 20000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--trace: give either --trace FILE or --ramp"),
        (("--ramp", "2:330,x"), "--isl: --ramp needs --isl and --osl"),
        (("--ramp", "2:330,x", "--isl", "9", "--osl", "9"), "--ramp: step 2, 'x', must be RATE:SECONDS"),
        (("--ramp", "2:-1", "--isl", "9", "--osl", "9"), "--ramp: step 1"),
        (("--ramp", "nan:5", "--isl", "9", "--osl", "9"), "--ramp: step 1"),
        (("--ramp", "0:60", "--isl", "9", "--osl", "9"), "--ramp: no step has a rate above 0"),
        (("--ramp", "1000:86400", "--isl", "9", "--osl", "9"), "--ramp: these are more than 1000000 requests"),
        (("--ramp", "2:9", "--isl", "-4", "--osl", "9"), "--isl: -4 tokens"),
        ((*RAMP, "--speed", "2"), "--speed: it goes with --trace"),
        ((*RAMP, "--window", "1:2"), "--window: it goes with --trace"),
        ((*RAMP, "--bounds", "1:2"), "--bounds: the manifest has those of both pools"),
        ((*RAMP, "--pool", "one", "--bounds", "5:2"), "--bounds: '5:2' must be LEAST:MOST"),
        ((*RAMP, "--engine", "qwen3-8b"), "did you mean qwen3-8b-h200?"),
        ((*RAMP, "--policy", "magic"), "--policy: there is no policy 'magic'"),
        ((*RAMP, "--policy", "static:1"), "must have the form static:P,D"),
        ((*RAMP, "--policy", "hpa", "--set", "x=1"), "hpa has no knob x"),
        ((*RAMP, "--set", "aim_bellow=0.5"), "--set: there is no setting 'aim_bellow'"),
        ((*RAMP, "--set", "tick_seconds"), "--set: 'tick_seconds' must be NAME=VALUE"),
        ((*RAMP, "--set", "tick_seconds=soon"), "--set: tick_seconds must be a number"),
        ((*RAMP, "--failures", "soon"), "--failures: 'soon' must be deaths per hour"),
        ((*RAMP, "--failures", "router@5"), "--failures: 'router@5'"),
        ((*RAMP, "--price", "1"), "--price: '1' must be two numbers"),
        ((*RAMP, "--prefill-order", "lifo"), "--prefill-order"),
        ((*RAMP, "--initial", "9,1"), "initial must be 0 to 4, got 9"),
        ((*RAMP, "--initial", "1.5,1"), "--initial: '1.5,1' must be whole numbers"),
        ((*RAMP, "--json", "/nowhere/x.json"), "--json: /nowhere/x.json cannot be written"),
    ],
)
def test_what_is_wrong_is_told_with_the_option_before_anything_runs(service, arguments, message):
    result = run(*arguments, "-f", service, code=2)
    assert message in result.stderr
    assert result.stdout == ""


def test_a_manifest_is_needed_and_must_be_right(tmp_path):
    assert "name the service's manifest" in run(*RAMP, code=2).stderr
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE.replace("ttftMilliseconds", "ttftMillis"))
    assert "ttftMillis: unknown field; did you mean 'ttftMilliseconds'?" in run(*RAMP, "-f", str(file), code=2).stderr


@pytest.mark.parametrize("policies", ["", ",", "hpa,hpa", "static:1,2,static:1,2"])
def test_policies_that_are_compared_are_there_and_different(service, policies):
    assert "--policies: " in run("compare", "--policies", policies, *RAMP, "-f", service, code=2).stderr


def test_a_setting_of_one_policy_leaves_the_others_alone(service):
    result = run("compare", "--policies", "hpa,static:1,1", "--set", "hpa.nonsense=1", *RAMP, "-f", service, code=2)
    assert "hpa has no knob nonsense" in result.stderr
    run("compare", "--policies", "static:1,1", "--set", "hpa.nonsense=1", *RAMP, "-f", service, code=0)


def test_the_help_names_every_policy():
    told = " ".join(run("--help").stdout.replace("│", " ").split())
    for name in POLICIES:
        assert name in told
