"""`kllm replay`: what the planner would have done with a recorded history."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_file, write_json
from kllm.commands.up import Tuning, load
from kllm.history.file import History, read_history
from kllm.history.replay import Replayed, instance_seconds, replayed
from kllm.sim.engines import EngineError, engine
from kllm.sim.offered import parse_window
from kllm_core.objectives import Role
from kllm_operator.history.moment import HistoryError
from kllm_operator.loop.settings import SettingError
from kllm_operator.service.scaled import scaled_of, with_chunks


@dataclass(frozen=True)
class Options:
    """Options of `kllm replay`, as they were typed; None was left out.

    Attributes:
        engine: whose timing the planner's learning begins with; None: that of the manifest, or a common one.
        every: show each moment, not only those at which something changes.
    """

    history: Path
    file: Path
    window: str | None = None
    engine: str | None = None
    tune: tuple[str, ...] = ()
    every: bool = False
    json: Path | None = None


def run(options: Options) -> int:
    """Returns 0 with a replay, 1 when it could not be written, 2 when something is wrong, 130 when interrupted."""
    try:
        if options.json is not None:
            check_file("--json", options.json)
        service = load(options.file)
        if service is None:
            return 2
        settings = with_chunks(Tuning(tune=options.tune).settings(), service)
        prior = None if options.engine is None else engine(options.engine).timing
        history = _cut(read_history(options.history), options.window)
    except (OptionError, HistoryError, SettingError, EngineError) as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    for note in history.notes:
        print(f"kllm: note: {note}", file=sys.stderr)
    scaled = scaled_of(service, start_seconds=history.header.start_seconds)
    scaled = scaled if prior is None else replace(scaled, prior=prior)
    steps: list[Replayed] = []
    status = 0
    try:
        for step in replayed(history.moments, scaled, settings):
            if options.every or not steps or _changes(steps[-1], step):
                print(_line(step))
            steps.append(step)
    except KeyboardInterrupt:  # what was decided until then is told
        status = 130
    print(_summary(steps))
    return _write(options, history, steps, is_interrupted=status != 0) or status


def _cut(history: History, window: str | None) -> History:
    if window is None:
        return history
    begin, end = parse_window(window)
    first = history.moments[0].at
    kept = tuple(moment for moment in history.moments if begin <= moment.at - first < end)
    if not kept:
        last = history.moments[-1].at - first
        raise OptionError("--window", f"no moment is in it: the last one is at {last:.0f} s")
    return History(history.header, kept, history.notes)


def _changes(before: Replayed, step: Replayed) -> bool:
    def told(each: Replayed) -> tuple[object, ...]:
        return each.plan.desired.prefill, each.plan.desired.decode, each.plan.desired.reason, each.differs

    return told(before) != told(step)


def _line(step: Replayed) -> str:
    desired = step.plan.desired
    counts = ", ".join(f"{role} {desired.of(role)}" for role in Role)
    recorded = ", ".join(f"{role} {step.recorded.of(role)}" for role in Role)
    other = f" [was {recorded}]" if step.differs else ""
    return f"{step.at:>8.0f} s  {counts}{other} ({desired.reason}): {desired.message}"


def _summary(steps: list[Replayed]) -> str:
    recorded, wanted = instance_seconds(steps)
    differing = sum(step.differs for step in steps)
    return (
        f"{len(steps)} moments, {differing} decided differently; instance hours: {recorded / 3600:.2f} as recorded, "
        f"{wanted / 3600:.2f} as the planner would have had it"
    )


def _write(options: Options, history: History, steps: list[Replayed], *, is_interrupted: bool) -> int:
    if options.json is None:
        return 0
    recorded, wanted = instance_seconds(steps)
    document = {
        "service": history.header.service,
        "interrupted": is_interrupted,
        "recorded_instance_seconds": round(recorded, 3),
        "planned_instance_seconds": round(wanted, 3),
        "decisions": [step.document() for step in steps],
    }
    try:
        write_json(options.json, document)
    except OSError as error:
        print(f"kllm: the results could not be written: {error}", file=sys.stderr)
        return 1
    return 0
