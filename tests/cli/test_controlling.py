"""What a manifest and the command line say to the control loop."""

import contextlib
import os
import re
import sys

import pytest
import yaml

from kllm.commands.up import Tuning
from kllm.controlling import scaled
from kllm.steps import JsonSteps, PlainSteps
from kllm_core.kinds.manifest import parse_service
from kllm_core.timing import DecodeTiming, PrefillTiming
from kllm_operator.loop.settings import LoopSettings, SettingError
from kllm_operator.service.scaled import with_chunks


def service(**spec):
    base = {
        "model": {"uri": "demo://tiny-random-llama", "name": "m"},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
    }
    document = {"apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "s"}}
    return parse_service(yaml.safe_dump(document | {"spec": base | spec}))


def test_bounds_budget_and_objectives_are_those_of_the_manifest():
    made = scaled(service(prefill={"maxReplicas": 3}, gpuBudget=4), start_seconds=9.0, pace=None)

    assert (made.limits.prefill.max_replicas, made.limits.decode.max_replicas, made.limits.gpu_budget) == (3, 1, 4)
    assert (made.objectives.ttft_seconds, made.start_seconds, made.advise_only) == (1.0, 9.0, False)
    assert made.timing is None
    assert scaled(service(scaling="External"), start_seconds=None, pace=None).advise_only


def test_paced_engines_are_foreseen_by_their_pace_if_it_tells_of_both_roles():
    timing = scaled(service(), start_seconds=None, pace="prefill=0.05+0.002n,decode=0.03+0.01b").timing

    assert timing.prefill == PrefillTiming(0.05, 0.002, 0.0)
    assert timing.decode == DecodeTiming(0.03, 0.01, 0.0)
    assert scaled(service(), start_seconds=None, pace="decode=0.03+0.01b").timing is None


def test_a_pace_may_stand_in_a_file(tmp_path):
    file = tmp_path / "pace.json"
    file.write_text('{"decode": {"a": 0.03, "b": 0.01, "c": 0}}')

    assert Tuning(pace=str(file)).canonical_pace() == Tuning(pace="decode=0.03+0.01b").canonical_pace()
    assert Tuning().canonical_pace() is None


def test_a_manifests_prefill_step_is_the_planners():
    chunked = service(prefill={"engineArgs": {"chunked-prefill-size": 256}})

    assert with_chunks(LoopSettings(), chunked).load.chunk_tokens == 256
    assert with_chunks(LoopSettings(), service()) == LoopSettings()


def test_a_setting_of_any_part_can_be_tuned():
    tuned = Tuning(tune=("tick-seconds=2", "stabilisation_seconds=20", "least_samples=3", "drain_seconds=9")).settings()

    assert (tuned.tick_seconds, tuned.drain_seconds) == (2.0, 9.0)
    assert (tuned.planner.stabilisation_seconds, tuned.load.least_samples) == (20.0, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ticks=1", "there is no setting 'ticks'"),
        ("tick_seconds", "NAME=NUMBER"),
        ("saturation=2", "between 0 and 1"),
        ("tick_seconds=0.05", "tick_seconds must be at least 0.1, got 0.05"),
        ("tick_seconds=nan", "tick_seconds must be a finite number of at least 0, got nan"),
        ("horizon_seconds=inf", "horizon_seconds must be a finite number of at least 0, got inf"),
        ("least_samples=inf", "least_samples must be a finite number of at least 0, got inf"),
        ("least_samples=2.5", "least_samples must be a whole number of at least 0, got 2.5"),
        ("stale_after_seconds=-1", "stale_after_seconds must be a finite number of at least 0, got -1"),
    ],
)
def test_a_setting_that_cannot_be_is_named(text, message):
    with pytest.raises(SettingError, match=message):
        Tuning(tune=(text,)).settings()


def test_decisions_are_lines_with_a_time_for_people(capsys):
    PlainSteps().tell("plan", "plan: prefill 1 -> 2", {"reason": "ScaledUp"})

    assert re.fullmatch(r"\d\d:\d\d:\d\d plan: prefill 1 -> 2\n", capsys.readouterr().err)


@pytest.mark.parametrize(("steps", "stream"), [(PlainSteps, "stderr"), (JsonSteps, "stdout")])
def test_a_decision_that_nobody_reads_any_more_is_left_out(monkeypatch, steps, stream):
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    try:
        monkeypatch.setattr(sys, stream, broken)
        steps().tell("plan", "plan: prefill 1 -> 2", {"reason": "ScaledUp"})  # raises nothing
    finally:
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            broken.close()
