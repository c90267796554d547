"""Cache hit and TTFT of routers on recorded traces, simulated: kLLM's and the formulas of others, against a ceiling.

python bench/router/cache_hit.py [--traces FOLDER] [--jobs N] [--only ROUTING ...] [--quick]

The ceiling is one cache of all instances' KV together that knows every block at once: with the engines' own eviction
(least recently used), and with an eviction that knows the future (Belady), which no router can reach.
"""

from __future__ import annotations

import argparse
import bisect
import concurrent.futures
import heapq
import json
import math
import multiprocessing
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kllm.bench.plan import Planned
from kllm.sim.engines import PRESETS
from kllm.sim.laws.base import Pool
from kllm.sim.offered import Part, of_trace
from kllm.sim.run import simulate
from kllm.sim.scenario import PoolSetup, RouterSetup, Routing, Scenario
from kllm_core.objectives import Objectives

HERE = Path(__file__).parent
TRACES = HERE.parents[2] / "shared" / "traces"
FILES = {"conversation": "mooncake_conversation.jsonl.gz", "arxiv": "mooncake_arxiv_first1000.jsonl.gz"}
CASES = (
    ("conversation", 8, 1.0), ("conversation", 16, 2.0), ("conversation", 8, 2.0), ("conversation", 16, 4.0),
    ("arxiv", 8, 1.0), ("arxiv", 16, 2.0),
)  # fmt: skip
"""Trace, prefill instances, and how many times as fast as recorded. Without a cache, 8 instances are busy for about
0.35 of their time at the recorded speed, and for 0.7 at twice that; 16 take twice as much."""
ENGINE = PRESETS["qwen3-32b-h200-tp2"]
BLOCK = 512
_SHOWN = 4


def requests(folder: Path, trace: str, speed: float, *, limit: int | None) -> tuple[Planned, ...]:
    """The trace, faster."""
    path = folder / FILES[trace]
    return of_trace(path, Part(speed=speed, limit=limit), inputs=None, outputs=None, seed=0).requests


def run(trace: str, instances: int, speed: float, routing: str, folder: Path, limit: int | None) -> dict[str, Any]:
    """One router on one trace."""
    pool = PoolSetup(ENGINE, least=instances, most=instances, gpus=2)
    outcome = simulate(
        Scenario(
            load=requests(folder, trace, speed, limit=limit),
            objectives=Objectives(4.0, 0.1, 90),
            policy=f"static:{instances},{instances}",
            pools={Pool.PREFILL: pool, Pool.DECODE: pool},
            router=RouterSetup(routing=Routing(routing), wait_seconds=600.0),
            sample_seconds=60.0,
        )
    )
    ttft = outcome.ttft
    return {
        "trace": trace, "instances": instances, "speed": speed, "routing": routing,
        "requests": outcome.requests.arrived, "finished": outcome.requests.finished,
        "hit": round(outcome.cached_share, _SHOWN),
        "ttft_seconds": {n: _rounded(getattr(ttft, n)) for n in ("mean", "p50", "p95", "p99")},
        "queue_p95_seconds": _rounded(outcome.stages["queue"].p95), "cpu_seconds": round(outcome.speed.cpu_seconds, 1),
    }  # fmt: skip


def ceiling(trace: str, instances: int, speed: float, folder: Path, limit: int | None) -> dict[str, Any]:
    """One cache with the room of all instances."""
    load = requests(folder, trace, speed, limit=limit)
    blocks = instances * ENGINE.kv_tokens // BLOCK
    shares = {"lru": _lru(load, blocks), "belady": _belady(load, blocks)}
    return {
        "trace": trace,
        "instances": instances,
        "speed": speed,
        "ceiling": {n: round(v, _SHOWN) for n, v in shares.items()},
    }


def _share(load: Sequence[Planned], hits: Sequence[int]) -> float:
    cached = sum(min(hit * BLOCK, each.input_tokens - 1) for each, hit in zip(load, hits, strict=True))
    return cached / sum(each.input_tokens for each in load)


def _full(request: Planned) -> tuple[int, ...]:
    return request.blocks[: request.input_tokens // BLOCK]


def _lru(load: Sequence[Planned], room: int) -> float:
    """Leaves go first, as in the engines: a prompt's blocks are used from its end to its start."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in load:
        blocks, hit = _full(request), 0
        while hit < len(blocks) and blocks[hit] in cache:
            hit += 1
        hits.append(hit)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > room:
            cache.popitem(last=False)
    return _share(load, hits)


def _belady(load: Sequence[Planned], room: int) -> float:
    """Gives up what is used again last."""
    uses: dict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(load):
        for block in _full(request):
            uses[block].append(index)
    following: dict[int, float] = {}
    order: list[tuple[float, int]] = []
    hits = []
    for index, request in enumerate(load):
        blocks, hit = _full(request), 0
        while hit < len(blocks) and blocks[hit] in following:
            hit += 1
        hits.append(hit)
        for block in blocks:
            place = bisect.bisect_right(uses[block], index)
            at = uses[block][place] if place < len(uses[block]) else math.inf
            if at == math.inf:
                following.pop(block, None)
            else:
                following[block] = at
                heapq.heappush(order, (-at, block))
        while len(following) > room:
            at, block = heapq.heappop(order)
            if following.get(block) == -at:
                del following[block]
    return _share(load, hits)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _SHOWN)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    ceilings = {_case(row): row["ceiling"] for row in rows if "ceiling" in row}
    lines = [
        "| trace | P | speed | router | hit | of the ceiling | TTFT mean | p50 | p95 | p99 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, most in ceilings.items():
        best = f"{100 * most['lru']:.1f} % (Belady {100 * most['belady']:.1f} %)"
        lines.append(f"| {case[0]} | {case[1]} | {case[2]:g} | ceiling | {best} | 100 % | | | | |")
        for row in (row for row in rows if "routing" in row and _case(row) == case):
            times = " | ".join(f"{row['ttft_seconds'][name]:.2f}" for name in ("mean", "p50", "p95", "p99"))
            share = row["hit"] / most["lru"]
            lines.append(f"| | | | {row['routing']} | {100 * row['hit']:.1f} % | {100 * share:.0f} % | {times} |")
    return "\n".join(lines)


def _case(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["trace"], row["instances"], row["speed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--only", action="append", choices=[each.value for each in Routing], help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="400 requests of each trace, results not kept")
    given = parser.parse_args()
    limit = 400 if given.quick else None
    path = HERE / "results" / "cache_hit.json"
    kept = json.loads(path.read_text())["runs"] if path.is_file() and given.only and not given.quick else []
    wanted = given.only or [each.value for each in Routing]
    rows = [row for row in kept if row.get("routing") not in wanted and "ceiling" not in row]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, context) as pool:
        jobs = [pool.submit(ceiling, *case, given.traces, limit) for case in CASES]
        jobs += [pool.submit(run, *case, routing, given.traces, limit) for case in CASES for routing in wanted]
        for job in concurrent.futures.as_completed(jobs):
            rows.append(job.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    order = [each.value for each in Routing]
    rows.sort(key=lambda r: (*_case(r), order.index(r["routing"]) if "routing" in r else -1))
    print(table(rows))
    if not given.quick:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"engine": "qwen3-32b-h200-tp2", "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
