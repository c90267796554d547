"""The requests of the planner's benchmark: a ramp, halves of recorded traces, and a mix of two that turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kllm.bench.plan import Planned
from kllm.sim.offered import Part, of_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
"""Where traces lie unless `--traces` says otherwise: beside the clone."""

RAMP = ((2.0, 330.0), (4.0, 360.0), (6.0, 360.0), (8.0, 360.0), (10.0, 360.0), (4.0, 360.0), (1.0, 300.0))
"""llm-d's staged ramp (BENCHMARK.md of its SLO-aware guide): requests per second, and for how many seconds."""
RAMP_SECONDS = sum(seconds for _, seconds in RAMP)

FILES = {
    "mooncake": "mooncake_conversation.jsonl.gz",
    "azure-conv": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "servegen-r1": "servegen_deepseek-r1_24h_x0.125.csv.gz",
}
_MIX_PERIOD = 1800.0


class MissingTraceError(SystemExit):
    """A trace is not there; the text says where it was looked for and what to do."""


def check_traces(folder: Path) -> None:
    """Find out before hours of work that one is missing."""
    missing = [name for name in FILES.values() if not (folder / name).is_file()]
    if missing:
        raise MissingTraceError(
            f"{folder} lacks {', '.join(missing)}; give the folder that has them with --traces FOLDER"
        )


@functools.cache
def ramp(seed: int) -> tuple[Planned, ...]:
    """The ramp as inference-perf sends it: as many requests in each stage as its rate says, at times drawn evenly, with
    prompts of 4,000 ± 300 tokens (3,500 to 4,500) and answers of 1,000 ± 80 (900 to 1,100).
    """
    rng, begin, requests = np.random.default_rng([seed, 1]), 0.0, []
    for rate, seconds in RAMP:
        times = np.sort(rng.uniform(begin, begin + seconds, size=round(rate * seconds))).tolist()
        inputs = np.clip(rng.normal(4000, 300, size=len(times)), 3500, 4500).astype(int).tolist()
        outputs = np.clip(rng.normal(1000, 80, size=len(times)), 900, 1100).astype(int).tolist()
        requests += list(zip(times, inputs, outputs, strict=True))
        begin += seconds
    return tuple(Planned(index, *request) for index, request in enumerate(requests))


@functools.cache
def part(folder: Path, name: str, begin: float, end: float, speed: float, scale: float) -> tuple[Planned, ...]:
    """A part of a trace, `speed` times as fast, with `scale` times the requests."""
    offered = of_trace(
        folder / FILES[name], Part(begin, end, speed=speed, scale=scale), inputs=None, outputs=None, seed=0
    )
    return offered.requests


@functools.cache
def mix(folder: Path, begin: float, end: float) -> tuple[Planned, ...]:
    """Conversation fades into reasoning and back every half hour: of each as many as its share of that moment says.

    Prompts of the one are long and its answers short, and the other way round.
    """
    seconds = end - begin
    long_prompts = part(folder, "mooncake", begin, end, 1.0, 4.0)
    long_answers = part(folder, "servegen-r1", 75_600 + begin, 75_600 + end, 1.0, 8.0)

    def share(at: float) -> float:
        return 0.5 + 0.5 * math.cos(2 * math.pi * (begin + at) / _MIX_PERIOD)

    rng = np.random.default_rng([round(begin), round(seconds)])
    kept = _thinned(long_prompts, share, rng) + _thinned(long_answers, lambda at: 1 - share(at), rng)
    kept.sort(key=lambda request: request.at)
    return tuple(replace(request, index=index) for index, request in enumerate(kept))


def _thinned(requests: Sequence[Planned], share: Callable[[float], float], rng: np.random.Generator) -> list[Planned]:
    chances = rng.random(len(requests)).tolist()
    return [request for request, chance in zip(requests, chances, strict=True) if chance < share(request.at)]
