"""Runs the fault matrix and writes what came of it; `make faults`.

python -m faults.matrix [--pairs 1 2] [--only TEXT ...] [--document docs/faults.md]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults import trial
from faults.cells import LIMIT_SECONDS, Cell, Fault, Outcome, Result, Stage, matrix
from faults.gated_fleet import gated_fleet

from kllm_core.objectives import Role

_RESULTS = Path(__file__).parent / "results" / "matrix.json"
_IDLE_CONNECTION_SECONDS = 6.0
_MORE_DESCRIPTORS = 8
"""More open files of the router than before all faults are a leak."""

_BEGIN, _END = "<!-- results: written by `make faults` -->\n", "<!-- end of results -->\n"


async def measure(cells: Sequence[Cell], pairs: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Run some cells on one fleet; returns their rows, and the router's open files before and after all."""
    rows = []
    async with gated_fleet(prefill=pairs, decode=pairs) as fleet:
        before = fleet.router_descriptors()
        for cell in cells:
            row = _row(await trial.run(fleet, cell, seed=matrix(pairs).index(cell)))
            rows.append(row)
            verdict = "ok  " if row["passed"] else "FAIL"
            _say(f"{verdict} {cell!s:34} {row['outcome']:12} {row['seconds']:6.2f} s  {row['message'][:120]}")
        # Idle connections to engines are closed by then.
        await asyncio.sleep(_IDLE_CONNECTION_SECONDS)
        return rows, [before, fleet.router_descriptors()]


def merge(before: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the matrix, new ones in the place of old ones of the same cell."""
    rows = {row["cell"]: row for row in [*before, *new]}
    order = [str(cell) for pairs in (2, 1) for cell in matrix(pairs)]
    return [rows[name] for name in order if name in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: per fleet, a line for each fault and role, a column for each stage."""
    lines = []
    for pairs in sorted({row["pairs"] for row in rows}, reverse=True):
        mine = {row["cell"]: row for row in rows if row["pairs"] == pairs}
        good = sum(row["passed"] for row in mine.values())
        lines += [f"### {pairs}P{pairs}D: {good} of {len(mine)} as they must be", ""]
        lines += ["| fault | on | " + " | ".join(stage.replace("_", " ") for stage in Stage) + " |"]
        lines += ["|---|---|" + "---|" * len(Stage)]
        for fault in Fault:
            for role in Role:
                cells = [mine.get(str(Cell(fault, stage, role, pairs))) for stage in Stage]
                shown = " | ".join(_shown(row) for row in cells)
                lines.append(f"| {fault.replace('_', ' ')} | {role.value} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    words = {Outcome.SUCCESS: "", Outcome.UNAVAILABLE: "503 ", Outcome.STREAM_ERROR: "error "}
    told = words.get(Outcome(row["outcome"]), f"{row['outcome']} ")
    text = f"{told}{row['seconds']:.1f} s"
    return text if row["passed"] else f"**{text}**"


def _row(result: Result) -> dict[str, Any]:
    cell = result.cell
    values = {name: value for name, value in asdict(result).items() if name != "cell"}
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    place = {"cell": str(cell), "pairs": cell.pairs, "fault": cell.fault, "stage": cell.stage, "role": cell.role}
    return {**place, "passed": result.passed, **rounded}


def _read() -> dict[str, Any]:
    if not _RESULTS.exists():
        return {"cells": [], "router_descriptors": {}}
    document: dict[str, Any] = json.loads(_RESULTS.read_text())
    return document


def _write(rows: Sequence[dict[str, Any]], descriptors: dict[str, list[int]], document: Path | None) -> None:
    facts = {"cores": os.cpu_count(), "model": "demo://tiny-random-llama", "limit_seconds": LIMIT_SECONDS}
    text = json.dumps({**facts, "router_descriptors": descriptors, "cells": rows}, indent=1)
    _RESULTS.write_text(text + "\n")
    if document is not None:
        text = document.read_text()
        begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
        document.write_text(f"{text[:begin]}\n{table(rows)}\n{text[end:]}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Returns 0 when every cell that was run is as it must be, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", choices=(1, 2), default=[2, 1])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cells whose name has one of these in it")
    parser.add_argument("--document", type=Path, help="Markdown file whose table is to be written")
    given = parser.parse_args()
    began = time.monotonic()
    known = _read()
    rows, descriptors, failed = known["cells"], known["router_descriptors"], 0
    for pairs in given.pairs:
        cells = [cell for cell in matrix(pairs) if not given.only or any(text in str(cell) for text in given.only)]
        if not cells:
            continue
        new, counted = asyncio.run(measure(cells, pairs))
        before, after = descriptors[f"{pairs}P{pairs}D"] = counted
        failed += sum(not row["passed"] for row in new) + (after > before + _MORE_DESCRIPTORS)
        _say(f"open files of the router: {before} before all faults, {after} after")
        rows = merge(rows, new)
        _write(rows, descriptors, given.document)
    _say(f"{failed} findings; {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
