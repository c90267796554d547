"""A prefix that most requests begin with, simulated: who spreads it before it overruns one instance.

python bench/router/hot_prefix.py

Eight prefill instances; 70 % of the prompts have the same first 16,384 tokens and 500 of their own, the others are
4,000 tokens like no other. At the highest rate one instance could compute a third of those with the prefix.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kllm.bench.plan import Planned
from kllm.sim.engines import PRESETS
from kllm.sim.laws.base import Pool
from kllm.sim.run import simulate
from kllm.sim.scenario import PoolSetup, RouterSetup, Routing, Scenario
from kllm_core.objectives import Objectives

RESULTS = Path(__file__).parent / "results" / "hot_prefix.json"
ENGINE = PRESETS["qwen3-32b-h200-tp2"]
INSTANCES, SECONDS, BLOCK = 8, 120.0, 512
RATES = (10.0, 25.0, 40.0)
_HOT_BLOCKS, _OWN_TOKENS, _OTHER_TOKENS = 32, 500, 4000


def requests(rate: float) -> tuple[Planned, ...]:
    """Prompts by chance."""
    rng = np.random.default_rng(3)
    times = np.sort(rng.uniform(0.0, SECONDS, rng.poisson(rate * SECONDS))).tolist()
    hot = (rng.random(len(times)) < 0.7).tolist()
    prefix = tuple(range(_HOT_BLOCKS))
    return tuple(
        Planned(n, at, _HOT_BLOCKS * BLOCK + _OWN_TOKENS if is_hot else _OTHER_TOKENS, 50, prefix if is_hot else ())
        for n, (at, is_hot) in enumerate(zip(times, hot, strict=True))
    )


def run(rate: float, routing: Routing) -> dict[str, Any]:
    """One router at one rate."""
    pool = PoolSetup(ENGINE, least=INSTANCES, most=INSTANCES)
    outcome = simulate(
        Scenario(
            load=requests(rate),
            objectives=Objectives(2.0, 0.1, 90),
            policy=f"static:{INSTANCES},{INSTANCES}",
            pools={Pool.PREFILL: pool, Pool.DECODE: pool},
            router=RouterSetup(routing=routing),
            count_from=20.0,
            sample_seconds=60.0,
        )
    )
    ttft = {name: round(getattr(outcome.ttft, name) or 0.0, 3) for name in ("mean", "p50", "p95", "p99")}
    return {"rate": rate, "routing": routing.value, "hit": round(outcome.cached_share, 4), "ttft_seconds": ttft}


def main() -> None:
    rows = [run(rate, routing) for rate in RATES for routing in Routing]
    print("| requests/s | router | hit | TTFT mean | p50 | p95 | p99 |\n|---|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{value:.2f}" for value in row["ttft_seconds"].values())
        print(f"| {row['rate']:g} | {row['routing']} | {100 * row['hit']:.1f} % | {times} |")
    RESULTS.write_text(json.dumps({"engine": "qwen3-32b-h200-tp2", "runs": rows}, indent=1) + "\n")
    print(RESULTS, file=sys.stderr)


if __name__ == "__main__":
    main()
