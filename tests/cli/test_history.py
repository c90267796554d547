"""What a control loop decides from is recorded, read back, and decided upon once more."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop.virtual_time import run_virtually
from loop.world import World
from plan.plan_helpers import IDLE, OBJECTIVES, TIMING, limits
from typer.testing import CliRunner

from kllm.history.file import parse_history, read_history
from kllm.history.replay import instance_seconds, replayed
from kllm.main import app
from kllm.sim.engines import PRESETS
from kllm_core.fleet import InstanceState
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_core.objectives import Objectives, Role
from kllm_core.steps import DesiredCounts
from kllm_operator.fleet.levels import LevelReport, StageCounts
from kllm_operator.fleet.told import Told
from kllm_operator.history.moment import Header, HistoryError, Moment
from kllm_operator.history.recorder import Recorder
from kllm_operator.history.writer import Writer
from kllm_operator.loop.deciding import Scaled
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.substrate.base import Observed

HEADER = '{"kind": "kllm-history", "service": "chat", "began_at": 1.0}\n'
NAMES = {"p0": Role.PREFILL, "d0": Role.DECODE}
SERVICE = """
apiVersion: kllm.io/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "demo://smollm2-135m", name: smollm2}
  objectives: {ttftMilliseconds: 1000, tpotMilliseconds: 50}
  prefill: {minReplicas: 1, maxReplicas: 8}
  decode: {minReplicas: 1, maxReplicas: 8}
"""


def report(at, arrivals):
    ended = StageCounts((0, 0, arrivals, *[0] * (len(LATENCY_BOUNDS_SECONDS) - 2)), 0.25 * arrivals)
    return LevelReport(
        "r", at, 1.0, arrivals, prompt_tokens=1000 * arrivals, output_tokens=50 * arrivals, stages={"ttft": ended}
    )


def moment(at, arrivals=0, *, desired=(1, 1)):
    observed = tuple(Observed(name, role, InstanceState.SERVING, None, "serves", at) for name, role in NAMES.items())
    told = {name: Told(heard_at=at, load=IDLE) for name in NAMES}
    levels = tuple(report(at - 5.0 + second, arrivals) for second in range(1, 6))
    return Moment(at, DesiredCounts(*desired, "Steady", "as it was"), observed, told, levels)


def recorded(moments, tmp_path, name="history.jsonl"):
    file = tmp_path / name
    with file.open("w") as opened:
        writer = Writer(opened, Header("kllm-history", "chat", 1.0, start_seconds=8.0))
        for each in moments:
            writer.add(each)
    return file


def scaled(**changes):
    return replace(Scaled(OBJECTIVES, limits(most=8), timing=TIMING, start_seconds=8.0), **changes)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50), st.booleans()), min_size=1, max_size=5))
def test_what_is_recorded_is_read_back(tmp_path_factory, ticks):
    times = sorted(at for at, _, _ in ticks)
    moments = tuple(
        replace(moment(float(at), arrivals), complete=complete)
        for at, (_, arrivals, complete) in zip(times, ticks, strict=True)
    )
    history = read_history(recorded(moments, tmp_path_factory.mktemp("history")))
    assert history.moments == moments
    assert history.header.start_seconds == 8.0


def test_a_gzipped_history_is_read_too(tmp_path):
    plain = recorded([moment(0.0), moment(5.0)], tmp_path)
    zipped = tmp_path / "history.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_history(zipped).moments == read_history(plain).moments


def test_a_running_loop_is_recorded_with_every_tick_and_report(tmp_path):
    file = tmp_path / "history.jsonl"

    async def ticks():
        world = World()
        with Recorder(file, service="chat", start_seconds=8.0) as recorder:
            async with world.running():
                world.control._publish = lambda told: recorder.publish(told, complete=True)
                world.rate = 30.0
                recorder.hear(report(1.0, 3))
                await asyncio.sleep(60.0)

    run_virtually(ticks())
    history = read_history(file)
    assert len(history.moments) >= 12
    assert [each.levels for each in history.moments[:2]] == [(report(1.0, 3),), ()]
    assert history.moments[-1].desired.prefill > 1
    assert {each.role for each in history.moments[-1].observed} == set(Role)


def test_a_simulation_that_was_recorded_is_decided_in_the_same_way_once_more(tmp_path):
    service, out = tmp_path / "service.yaml", tmp_path / "outcome.json"
    history, engine = tmp_path / "history.jsonl", "qwen3-8b-h200"
    service.write_text(SERVICE)
    arguments = ["--ramp", "2:60,8:120", "--isl", "4000", "--osl", "100", "-f", str(service), "--engine", engine]
    arguments += ["--start-seconds", "15", "--json", str(out), "--record", str(history)]
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    decided = json.loads(out.read_text())["decisions"]
    assert max(each["desired"]["prefill"] for each in decided) > 1
    moments = read_history(history).moments
    timing = PRESETS[engine].timing
    objectives = Objectives(1.0, 0.05, 90)
    again = list(replayed(moments, Scaled(objectives, limits(most=8), timing=timing, start_seconds=15), LoopSettings()))
    assert len(again) > 30
    # Judged by what serves and starts, not by its own decisions, it may be a tick earlier or later.
    assert sum(each.differs for each in again) <= 0.1 * len(again)

    assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 2
    result = CliRunner().invoke(app, ["simulate", *arguments[:-1], str(tmp_path / "new"), "--policy", "hpa"])
    assert result.exit_code == 2
    assert "--record: it records what slo decides from" in result.stderr
    result = CliRunner().invoke(app, ["simulate", *arguments[:-1], str(tmp_path / "new"), "--pool", "one"])
    assert result.exit_code == 2
    assert "--record: `kllm replay` decides on prefill and decode" in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_recording_overwrites_nothing(tmp_path):
    file = tmp_path / "history.jsonl"
    file.write_text("precious")
    with pytest.raises(FileExistsError):
        Recorder(file, service="chat")
    assert file.read_text() == "precious"


def test_a_planner_that_sees_the_same_load_grow_asks_for_more_than_was_there():
    moments = tuple(moment(5.0 * tick, 2 if tick < 12 else 25) for tick in range(40))
    steps = list(replayed(moments, scaled(), LoopSettings()))
    assert [each.plan.desired.prefill for each in steps[2:12]] == [1] * 10
    assert steps[-1].plan.desired.prefill > 1
    assert steps[-1].differs
    assert not steps[5].differs
    was, wanted = instance_seconds(steps)
    assert was == pytest.approx(2 * 5.0 * 39)
    assert wanted > was


def test_without_reports_of_routers_nothing_is_known_and_nothing_changes():
    moments = tuple(replace(moment(5.0 * tick), levels=()) for tick in range(10))
    steps = list(replayed(moments, scaled(), LoopSettings()))
    assert {each.plan.desired.reason for each in steps[1:]} == {"LoadUnknown"}
    assert not any(each.differs for each in steps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no moments"),
        (HEADER, "it holds no moments"),
        ("{}\n", "line 1: kind: Field required"),
        ('{"kind": "other", "service": "chat", "began_at": 1}\n', "line 1: it is a 'other' of version 1"),
        (HEADER + "nonsense\n", "line 2: Invalid JSON"),
        (HEADER + '{"at": 1}\n', "line 2: desired: Field required"),
        (
            HEADER + '{"at": 1, "desired": {"prefill": -1, "decode": 1, "reason": "", "message": ""}}\n',
            "line 2: desired: counts must not be negative",
        ),
    ],
)
def test_what_is_no_history_is_told_with_its_line(text, message):
    with pytest.raises(HistoryError, match=message):
        parse_history(text.splitlines(keepends=True))


def line(at):
    return json.dumps({"at": at, "desired": {"prefill": 1, "decode": 1, "reason": "Steady", "message": ""}}) + "\n"


def test_time_that_runs_backwards_is_refused_and_a_gap_is_told():
    with pytest.raises(HistoryError, match="line 3: time runs backwards, by 5 s"):
        parse_history([HEADER, line(10), line(5)])
    history = parse_history([HEADER, line(10), "\n", line(400)])
    assert history.notes == ("line 4: nothing was recorded for 390 s before it; what is measured begins anew there",)
    assert parse_history([HEADER, line(10), line(15)]).notes == ()


def test_a_replay_that_is_interrupted_keeps_what_was_decided(tmp_path, monkeypatch):
    def stopped(*given):
        yield from itertools.islice(replayed(*given), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr("kllm.commands.replay.replayed", stopped)
    file = recorded([moment(5.0 * tick) for tick in range(10)], tmp_path)
    service, out = tmp_path / "service.yaml", tmp_path / "replay.json"
    service.write_text(SERVICE)
    result = CliRunner().invoke(app, ["replay", str(file), "-f", str(service), "--json", str(out)])
    assert result.exit_code == 130
    document = json.loads(out.read_text())
    assert document["interrupted"] is True
    assert len(document["decisions"]) == 3


def test_the_command_tells_changes_and_writes_every_decision(tmp_path):
    file = recorded([moment(5.0 * tick, 2 if tick < 12 else 25) for tick in range(40)], tmp_path)
    service, out = tmp_path / "service.yaml", tmp_path / "replay.json"
    service.write_text(SERVICE)
    result = CliRunner().invoke(app, ["replay", str(file), "-f", str(service), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "[was prefill 1, decode 1]" in result.stdout
    assert "40 moments" in result.stdout.splitlines()[-1]
    document = json.loads(out.read_text())
    assert len(document["decisions"]) == 40
    assert document["planned_instance_seconds"] > document["recorded_instance_seconds"] == 390.0

    assert document["interrupted"] is False

    cut = CliRunner().invoke(app, ["replay", str(file), "-f", str(service), "--window", "50:100"])
    assert "10 moments" in cut.stdout
    for wrong, message in ((("--window", "900:"), "the last one is at 195 s"), (("--set", "x=1"), "no setting 'x'")):
        result = CliRunner().invoke(app, ["replay", str(file), "-f", str(service), *wrong])
        assert result.exit_code == 2
        assert message in result.stderr
