"""Bindings compared on one load, simulated: decode chosen on arrival, when the prompt is computed, and just before.

python bench/router/bindings.py [--traces FOLDER] [--jobs N] [--quick]

Decode instances admit requests and take KV between their steps only, messages take 1 ms, and a transfer's handshake
20 ms. With few decode instances their KV runs short, which is where early binding holds room for prompts that are
not computed yet.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kllm.sim.engines import PRESETS
from kllm.sim.laws.base import Pool
from kllm.sim.offered import Part, of_trace
from kllm.sim.run import simulate
from kllm.sim.scenario import Link, PoolSetup, RouterSetup, Scenario
from kllm_core.objectives import Binding, Objectives

HERE = Path(__file__).parent
TRACES = HERE.parents[2] / "shared" / "traces"
CASES = {
    "conversation, ample decode": ("mooncake_conversation.jsonl.gz", 2.0, 8, 8),
    "conversation, scarce decode": ("mooncake_conversation.jsonl.gz", 2.0, 8, 2),
    "short prompts": ("azure2023_conv.csv.gz", 4.0, 3, 3),
}
"""Trace, times as fast, prefill instances, decode instances."""
_SECONDS = 1800.0


def run(case: str, binding: Binding, folder: Path, seconds: float) -> dict[str, Any]:
    """One binding on one load."""
    name, speed, prefill, decode = CASES[case]
    engine = PRESETS["qwen3-32b-h200-tp2"]
    part = Part(end=seconds * speed, speed=speed)
    outcome = simulate(
        Scenario(
            load=of_trace(folder / name, part, inputs=None, outputs=None, seed=0).requests,
            objectives=Objectives(4.0, 0.1, 90),
            policy=f"static:{prefill},{decode}",
            pools={
                Pool.PREFILL: PoolSetup(engine, least=prefill, most=prefill),
                Pool.DECODE: PoolSetup(engine, least=decode, most=decode),
            },
            link=Link(base_seconds=0.02),
            router=RouterSetup(binding=binding, wait_seconds=600.0, park_seconds=600.0, hop_seconds=0.001),
            sample_seconds=60.0,
        )
    )
    return {
        "case": case,
        "binding": binding.value,
        "requests": outcome.requests.arrived,
        "finished": outcome.requests.finished,
        "ttft_ms": _milliseconds(outcome.ttft),
        "transfer_ms": _milliseconds(outcome.stages["transfer"]),
        "tpot_ms": _milliseconds(outcome.tpot),
    }


def _milliseconds(percentiles: Any) -> dict[str, float | None]:
    values = {name: getattr(percentiles, name) for name in ("mean", "p50", "p95")}
    return {name: None if value is None else round(value * 1e3, 1) for name, value in values.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| load | binding | TTFT mean ms | p50 | p95 | transfer p50 | TPOT p50 |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        ttft = row["ttft_ms"]
        lines.append(
            f"| {row['case']} | {row['binding']} | {ttft['mean']} | {ttft['p50']} | {ttft['p95']} "
            f"| {row['transfer_ms']['p50']} | {row['tpot_ms']['p50']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="a minute of each, results not kept")
    given = parser.parse_args()
    seconds = 60.0 if given.quick else _SECONDS
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, context) as pool:
        jobs = [pool.submit(run, case, binding, given.traces, seconds) for case in CASES for binding in Binding]
        rows = [job.result() for job in jobs]
    print(table(rows))
    if not given.quick:
        path = HERE / "results" / "bindings.json"
        path.write_text(json.dumps({"engine": "qwen3-32b-h200-tp2", "runs": rows}, indent=1) + "\n")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
