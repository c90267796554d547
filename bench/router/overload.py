"""More load than the fleet can bear, simulated: admission by slack and fair shares against first come, first served.

python bench/router/overload.py [--traces FOLDER] [--jobs N] [--quick]

Prompts of four clients' keys come at 0.8 to 2 times of what four prefill instances can compute: one asks for most, one
for little, and one has long prompts only. First come, first served is the same router without an objective: it refuses
when every queue is longer than 60 s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kllm.bench.plan import Planned
from kllm.bench.row import Status
from kllm.sim.engines import PRESETS
from kllm.sim.flights import Flight
from kllm.sim.laws.base import Pool
from kllm.sim.run import simulate
from kllm.sim.scenario import PoolSetup, RouterSetup, Scenario
from kllm_core.objectives import Objectives
from kllm_router.scheduling.admission import AdmissionSettings
from kllm_router.scheduling.slack import SlackSettings

HERE = Path(__file__).parent
ENGINE = PRESETS["qwen3-32b-h200-tp2"]
INSTANCES, TTFT, TPOT = 4, 2.0, 0.1
KEYS = {"most": (0.70, 3000), "some": (0.22, 3000), "little": (0.05, 3000), "long prompts": (0.03, 16_000)}
"""Share of the requests, and median tokens of their prompts."""
OVERLOADS = (0.8, 1.0, 1.25, 1.5, 2.0)


def requests(overload: float, seconds: float, seed: int) -> tuple[Planned, ...]:
    """Prompts by chance, log-normal, so many that computing them one by one takes so many times what there is."""
    rng = np.random.default_rng([seed, 7])
    names = list(KEYS)
    tokens: list[int] = []
    keys: list[str] = []
    work, wanted = 0.0, overload * INSTANCES * seconds
    while work < wanted:
        key = names[rng.choice(len(names), p=[share for share, _ in KEYS.values()])]
        size = int(np.clip(rng.lognormal(np.log(KEYS[key][1]), 0.6), 100, 60_000))
        work += ENGINE.timing.prefill.seconds(size)
        keys.append(key)
        tokens.append(size)
    times = np.sort(rng.uniform(0.0, seconds, len(tokens))).tolist()
    outputs = rng.integers(20, 200, len(tokens)).tolist()
    rows = zip(times, tokens, outputs, keys, strict=True)
    return tuple(Planned(n, at, size, out, key=key) for n, (at, size, out, key) in enumerate(rows))


class Ends:
    """Hears how each request ended, by its key."""

    def __init__(self) -> None:
        self.of: dict[str, list[Flight]] = {name: [] for name in KEYS}

    def arrived(self, flight: Flight) -> None:
        """Nothing is counted before the end."""

    def showed(self, flight: Flight) -> None:
        """Nothing is counted before the end."""

    def ended(self, flight: Flight) -> None:
        """A request has ended."""
        self.of[flight.key].append(flight)


def run(overload: float, policy: str, seconds: float, seed: int) -> dict[str, Any]:
    """One admission under one load."""
    pool = PoolSetup(ENGINE, least=INSTANCES, most=INSTANCES)
    objective = TTFT if policy == "slack" else None
    ends = Ends()
    outcome = simulate(
        Scenario(
            load=requests(overload, seconds, seed),
            objectives=Objectives(TTFT, TPOT, 90),
            policy=f"static:{INSTANCES},{INSTANCES}",
            pools={Pool.PREFILL: pool, Pool.DECODE: pool},
            router=RouterSetup(admission=AdmissionSettings(slack=SlackSettings(ttft_seconds=objective))),
            sample_seconds=60.0,
            seed=seed,
        ),
        listener=ends,
    )
    keys = {name: _of_key(flights) for name, flights in ends.of.items()}
    return {
        "overload": overload, "admission": policy, "seed": seed, "requests": outcome.requests.arrived,
        "refused": outcome.requests.rejected, "attainment": round(outcome.attainment.both, 4),
        "ttft_p95_of_served": round(outcome.ttft.p95 or 0.0, 3), "keys": keys,
    }  # fmt: skip


def _of_key(flights: Sequence[Flight]) -> dict[str, float]:
    served = [each for each in flights if each.status is Status.OK and each.ttft is not None]
    met = [each for each in served if (each.ttft or 0.0) <= TTFT and (each.tpot or 0.0) <= TPOT]
    number = max(1, len(flights))
    return {
        "requests": len(flights), "served": round(len(served) / number, 4), "attained": round(len(met) / number, 4),
        "longest_gap_seconds": round(_longest_gap([each.at for each in flights], [each.at for each in served]), 1),
    }  # fmt: skip


def _longest_gap(asked: Sequence[float], served: Sequence[float]) -> float:
    """Longest time in which a key asked and nothing that it sent was let in and served."""
    if not asked:
        return 0.0
    moments = [min(asked), *sorted(served), max(asked)]
    return max(after - before for before, after in itertools.pairwise(moments))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, means over seeds."""
    lines = [
        "| load | admission | attained | served: " + " | ".join(KEYS) + " | TTFT p95 of served | longest without |",
        "|---|---|---|" + "---|" * (len(KEYS) + 2),
    ]
    for overload in OVERLOADS:
        for policy in ("first come", "slack"):
            mine = [row for row in rows if (row["overload"], row["admission"]) == (overload, policy)]
            if not mine:
                continue
            attained = np.mean([row["attainment"] for row in mine])
            served = [np.mean([row["keys"][name]["served"] for row in mine]) for name in KEYS]
            late = np.mean([row["ttft_p95_of_served"] for row in mine])
            gap = max(row["keys"][name]["longest_gap_seconds"] for row in mine for name in KEYS)
            cells = " | ".join(f"{100 * share:.0f} %" for share in served)
            lines.append(f"| {overload:g} | {policy} | {100 * attained:.1f} % | {cells} | {late:.2f} s | {gap:.0f} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="a minute each, results not kept")
    given = parser.parse_args()
    seconds, seeds = (60.0, (0,)) if given.quick else (600.0, (0, 1, 2))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, context) as pool:
        jobs = [
            pool.submit(run, overload, policy, seconds, seed)
            for overload in OVERLOADS
            for policy in ("first come", "slack")
            for seed in seeds
        ]
        rows = [job.result() for job in jobs]
    print(table(rows))
    if not given.quick:
        document = {"engine": "qwen3-32b-h200-tp2", "instances": INSTANCES, "ttft_seconds": TTFT, "runs": rows}
        (HERE / "results" / "overload.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
