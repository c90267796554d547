"""`kllm simulate`: what a policy would have done with a load, in a simulation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_new_file, write_json
from kllm.commands.up import load
from kllm.sim.compare import default_jobs, interruptible, run_all
from kllm.sim.offered import Offered
from kllm.sim.options import Options
from kllm.sim.outcome import Outcome
from kllm.sim.plot import draw
from kllm.sim.progress import Progress
from kllm.sim.report import table_of, text_of
from kllm.sim.run import simulate
from kllm.sim.scenario import SLO, Scenario, ScenarioError
from kllm.sim.texts import parse_policies
from kllm.tables import new_console, new_table
from kllm_operator.history.recorder import Recorder

_INTERRUPTED = 130


@dataclass(frozen=True)
class _Prepared:
    """Everything that a simulation needs."""

    service_file: Path
    service: str
    options: Options
    offered: Offered
    scenarios: tuple[Scenario, ...]

    def document(self, outcome: Outcome) -> dict[str, Any]:
        """An outcome with what it was asked for."""
        return {
            **outcome.document(),
            "objectives": asdict(self.scenarios[0].objectives),
            "load": {
                "name": self.offered.name,
                "requests": len(self.offered.requests),
                "seconds": self.offered.seconds,
                "notes": list(self.offered.notes),
            },
            "arguments": {"file": str(self.service_file), **self.options.document()},
        }


def run(file: Path, options: Options, policy: str, *, record: Path | None = None) -> int:
    """Simulate one policy.

    Args:
        file: the manifest.
        options: all that `compare` has, too.
        policy: who decides counts.
        record: a new file that all that `slo` decides from is written to; None: nothing is recorded.

    Returns:
        0 with an outcome, 1 when it could not be written, 2 when an option is wrong, 130 when interrupted.
    """
    try:
        if record is not None:
            _check_record(record, policy, options)
        prepared = _prepare(file, options, [policy])
    except OptionError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    if prepared is None:
        return 2
    scenario, stopped = prepared.scenarios[0], []
    with (
        _recorder(prepared, record) as recorder,
        interruptible(lambda: stopped.append(True)),
        Progress([(policy, scenario.ends_at)]) as progress,
    ):
        try:
            outcome = simulate(
                scenario,
                progress=lambda at_seconds, finished: progress.update(0, at_seconds, finished),
                stop=lambda: bool(stopped),
                recorder=recorder,
            )
        except ScenarioError as error:
            print(f"kllm: {error}", file=sys.stderr)
            return 2
    # Files first: whoever reads the text may have gone by now.
    is_written = _write(prepared, [outcome], document=prepared.document(outcome))
    print(text_of(outcome, title=prepared.offered.name, objectives=scenario.objectives))
    if outcome.is_interrupted:
        return _INTERRUPTED
    return 0 if is_written else 1


def compare(file: Path, options: Options, policies: str, *, jobs: int | None) -> int:
    """Simulate several policies with the same load, some at a time.

    Returns:
        0 with all outcomes, 1 when one is missing or could not be written, 2 when an option is wrong, 130 when
        interrupted.
    """
    try:
        names = parse_policies(policies)
        prepared = _prepare(file, options, names)
    except OptionError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    if prepared is None:
        return 2
    problems: list[str] = []
    told = run_all(prepared.scenarios, jobs=jobs or default_jobs(len(names)), names=names, complain=problems.append)
    for problem in problems:
        print(f"kllm: {problem}", file=sys.stderr)
    outcomes = [outcome for outcome in told if outcome is not None]
    if not outcomes:
        print("kllm: there is no outcome to show", file=sys.stderr)
        return 1 if problems else _INTERRUPTED
    is_written = _write(prepared, outcomes, document=[prepared.document(outcome) for outcome in outcomes])
    _print_table(prepared.offered, outcomes)
    if len(outcomes) + len(problems) < len(names) or any(outcome.is_interrupted for outcome in outcomes):
        return _INTERRUPTED
    return 0 if is_written and not problems else 1


def _check_record(path: Path, policy: str, options: Options) -> None:
    if policy != SLO:
        raise OptionError("--record", f"it records what {SLO} decides from; other policies see something else")
    if options.one_pool:
        raise OptionError("--record", "`kllm replay` decides on prefill and decode; it goes with --pool pd")
    check_new_file("--record", path)


def _recorder(prepared: _Prepared, path: Path | None) -> contextlib.AbstractContextManager[Recorder | None]:
    if path is None:
        return contextlib.nullcontext()
    starts = None if prepared.options.cold else prepared.options.start_seconds
    return Recorder(path, service=prepared.service, start_seconds=starts)


def _prepare(file: Path, options: Options, policies: Sequence[str]) -> _Prepared | None:
    """Read and check all, since a long run must not end with a wrong option; None for a manifest that is wrong.

    Raises:
        OptionError: an option is wrong.
    """
    options.check()
    service = load(file)
    if service is None:
        return None
    offered = options.offered()
    scenarios = tuple(options.scenario(service, offered, policy) for policy in policies)
    least = min(pool.engine.kv_tokens for pool in scenarios[0].pools.values())
    if misfits := offered.too_long(least):
        offered = replace(offered, notes=(*offered.notes, misfits))
    for note in offered.notes:
        print(f"kllm: note: {note}", file=sys.stderr)
    return _Prepared(file, service.name, options, offered, scenarios)


def _print_table(offered: Offered, outcomes: Sequence[Outcome]) -> None:
    titles, rows = table_of(outcomes)
    table = new_table(*titles, texts=1)
    for row in rows:
        table.add_row(*row)
    console = new_console()
    console.print(f"{offered.name}: {len(offered.requests)} requests", soft_wrap=True)
    console.print(table)


def _write(prepared: _Prepared, outcomes: Sequence[Outcome], *, document: Any) -> bool:
    options = prepared.options
    try:
        if options.json is not None:
            write_json(options.json, document)
        if options.plot is not None:
            for outcome in outcomes:
                draw(outcome, _plot_path(options.plot, outcome, outcomes), title=prepared.offered.name)
    except OSError as error:
        print(f"kllm: the results could not be written: {error}", file=sys.stderr)
        return False
    return True


def _plot_path(path: Path, outcome: Outcome, outcomes: Sequence[Outcome]) -> Path:
    """One picture for each policy, beside each other."""
    if len(outcomes) == 1:
        return path
    name = "".join(letter if letter.isalnum() else "-" for letter in outcome.policy)
    return path.with_name(f"{path.stem}-{name}{path.suffix}")
