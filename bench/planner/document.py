"""Writes the figures of docs/planner.md from the raw results.

python bench/planner/document.py [docs/planner.md]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import ablation
import baselines
import cases
import choosing
import pd
import store
import sweeps
import truth_table

_DOCUMENT = Path(__file__).parents[2] / "docs" / "planner.md"
_BEGIN, _END = "<!-- figures: written by `make bench-planner` -->\n", "<!-- end of figures -->\n"
_TUNED = " †"
_NAMES = {"slo": "**kLLM**", "static": "best static counts"}

Row = dict[str, Any]


class Results:
    """Figures by the descriptions of runs."""

    def __init__(self, name: str) -> None:
        self._rows = {store.key(row["run"]): row["figures"] for row in store.read(name)}

    def of(self, specs: Iterable[cases.Spec]) -> list[Row]:
        """Those that there are."""
        return [self._rows[store.key(spec)] for spec in specs if store.key(spec) in self._rows]

    def get(self, specs: Iterable[cases.Spec]) -> list[Row]:
        """All of them, for the scripts' own choices; nothing is run.

        Raises:
            KeyError: one is missing.
        """
        return [self._rows[store.key(spec)] for spec in specs]


def published() -> list[str]:
    """llm-d's own figures beside those of its law here."""
    runs, lines = Results("published"), []
    told = {
        "as it is": "95.8 % at 5.93",
        "cold predictor": "85.6 %",
        "mean instead of P90": "84.7 %",
        "static 8": "100 % at 8",
    }
    for name, specs in baselines.published(quick=False).items():
        rows = runs.of(specs)
        if rows:
            shares = [row["attainment"]["both"] for row in rows]
            lines.append(
                f"| {name} | {told.get(name, '')} | {_percent(fmean(shares))} ({_percent(min(shares))} to "
                f"{_percent(max(shares))}) | {fmean(row['mean_until_least'] for row in rows):.2f} |"
            )
    return _table("| llm-d's law | published | attainment here, mean of 12 episodes (range) | mean replicas |", lines)


def curve() -> list[str]:
    """All laws on the ramp by start time."""
    runs, lines = Results("curve"), []
    for policy in sweeps.ONE_POOL:
        cells = [_curve_cell(runs, start, policy) for start in baselines.STARTS]
        if any(cells):
            lines.append(f"| {_NAMES.get(policy, policy)} | " + " | ".join(cells) + " |")
    head = "| law | " + " | ".join(f"{start} s" for start in baselines.STARTS) + " |"
    note = f"{_TUNED.strip()} on the arrivals that the knobs were chosen on; all others on new ones."
    return [*_table(head, lines), *(["", note] if any(_TUNED in line for line in lines) else [])]


def _curve_cell(runs: Results, start: int, policy: str) -> str:
    """Empty until all knobs were tried."""
    specs = [baselines.tried(start, policy, knobs) for knobs in sweeps.ONE_POOL[policy]]
    tried = [(mine[0], rows) for mine in specs if (rows := runs.of(mine))]
    if len(tried) < len(specs):
        return ""
    best = choosing.cheapest(tried)
    rows, mark = runs.of(baselines.reported(best, quick=False)), ""
    if not rows:
        rows, mark = next(figures for spec, figures in tried if spec is best), _TUNED
    return f"{_percent(choosing.attained(rows))} at {choosing.cost(rows):.2f}{mark}"


def two_pools(start: int = 60) -> list[str]:
    """All laws on traces."""
    runs, lines = Results("pd"), []
    for case, trace in cases.TRACES.items():
        try:
            picked = pd.chosen(pd.Tuning(case, start=start, quick=False, runs=runs))
        except KeyError:
            continue
        lines.append(f"| *{case}*: {trace.ttft:g} s, {trace.tpot * 1000:g} ms | | | | | |")
        for policy, by_purpose in picked.items():
            (spec, [best]), (_, [equal]) = by_purpose["cheapest"], by_purpose["equal"]
            most = f"{_percent(equal['attainment']['both'])} at {equal['gpu_seconds'] / 3600:.1f}"
            name = _NAMES.get(policy, policy) + (f" {spec['policy'].partition(':')[2]}" if policy == "static" else "")
            lines.append(
                f"| {name} | {best['gpu_seconds'] / 3600:.1f} | {_percent(best['attainment']['both'])} | "
                f"{best['mean_replicas']['prefill']:.2f} + {best['mean_replicas']['decode']:.2f} | "
                f"{best['flips'] or ''} | {most} |"
            )
    return _table("| law | GPU hours | attainment | mean prefill + decode | flips | most for what kLLM costs |", lines)


def ablations() -> list[str]:
    """The planner without one part each."""
    runs, lines = Results("ablation"), []
    specs = ablation.specs(quick=False)
    for name in ablation.ABLATIONS:
        cells = []
        for mine in specs.values():
            rows = runs.of(mine.get(name, []))
            unit = (
                (lambda row: f"{row:.2f}")
                if rows and "mean_during_load" in rows[0]
                else (lambda row: f"{row / 3600:.1f} h")
            )
            cells.append(f"{_percent(choosing.attained(rows))} at {unit(choosing.cost(rows))}" if rows else "")
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return _table("| without | " + " | ".join(specs) + " |", lines)


def _table(head: str, lines: Sequence[str]) -> list[str]:
    return [head, "|---" * (head.count("|") - 1) + "|", *lines] if lines else ["Not measured yet."]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _DOCUMENT
    parts = {
        "### llm-d's law on its own ramp": published(),
        "### Start times, one pool": curve(),
        "### Two pools": two_pools(),
        "### What each part is worth": ablations(),
        "### Simulated against real": truth_table.table(),
    }
    text = path.read_text()
    begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    body = "\n\n".join(head + "\n\n" + "\n".join(lines) for head, lines in parts.items())
    path.write_text(f"{text[:begin]}\n{body}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
