"""What is simulated: one run from its description, which is plain JSON and the key of its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import loads
from lesser import without

from kllm.bench.plan import Planned
from kllm.sim.engines import PRESETS
from kllm.sim.laws.base import Pool
from kllm.sim.outcome import Outcome, Point
from kllm.sim.run import simulate
from kllm.sim.scenario import SLO, PoolSetup, RouterSetup, Routing, Scenario, StartTimes
from kllm_core.engine_model.spec import EngineSpec
from kllm_core.objectives import Objectives
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming
from kllm_operator.loop.settings import LoopSettings

Spec = dict[str, Any]
"""`case`, `start` (seconds), `policy`, and where needed `seed`, `half` (1, 2), `knobs`, `routing`, `warm`, `flippable`,
`slots`, `percentile`, `without`."""

_TAIL_SECONDS = 900.0
_WARM_UP_SECONDS = 300.0
"""Not counted at the beginning of each half: laws that look at minutes, and caches, have to see some first."""
_INITIAL = 4
"""Instances of each pool that every law begins with there."""
_SAMPLE_SECONDS = 5.0


def h100_tp2() -> EngineSpec:
    """llm-d's replica, Qwen3-32B on two H100, from what is published of it.

    The H200 timing with prefill 1.09 times as long (15,928 tokens/s measured against 17,400) and decode 1.43 times (the
    memory is 4.8 / 3.35 times as slow), a KV pool of 350,000 tokens, and vLLM's scheduler: prompts and decode share
    steps, and a request is admitted when its prompt fits.
    """
    timing = PRESETS["qwen3-32b-h200-tp2"].timing
    prefill, decode = timing.prefill, timing.decode
    slower = EngineTiming(
        PrefillTiming(prefill.a * 1.09, prefill.b * 1.09, prefill.k * 1.09),
        DecodeTiming(decode.a * 1.43, decode.b * 1.43, decode.c * 1.43),
    )
    return EngineSpec(slower, kv_tokens=350_000, mixed=True, reserve_tokens=0)


@dataclass(frozen=True)
class Trace:
    """A trace of two pools.

    Attributes:
        middle: second of the trace between the half for tuning and the half for reporting.
        engine: preset.
        speed: times as fast.
        scale: times the requests.
    """

    begin: float
    middle: float
    end: float
    engine: str
    ttft: float
    tpot: float
    speed: float = 1.0
    scale: float = 1.0
    most: int = 12


TRACES = {
    "mooncake": Trace(0, 1770, 3540, "qwen3-235b-fp8-h200-tp8", ttft=10.0, tpot=0.05, scale=4.0),
    "azure-conv": Trace(0, 1751, 3502, "deepseek-v3-h200-tp8", ttft=1.0, tpot=0.05, scale=4.0),
    "azure-code": Trace(0, 1718, 3436, "deepseek-v3-h200-tp8", ttft=2.0, tpot=0.05, scale=4.0),
    "servegen-r1": Trace(72_000, 79_200, 86_400, "deepseek-v3-h200-tp8", ttft=4.0, tpot=0.05, speed=2.0),
    "mix": Trace(0, 1770, 3540, "qwen3-235b-fp8-h200-tp8", ttft=10.0, tpot=0.025),
}
"""Recorded rates are too low for more than two instances of a pool, so most are offered several times over. Objectives
are those that the engine can meet for the longest prompts of the trace, near ones that are published for such use."""
GPUS = 8
"""Of one instance of these engines."""


def run(spec: Spec, folder: Path) -> dict[str, Any]:
    """Simulate; returns the figures of the outcome."""
    made = scenario(spec, folder)
    with without(spec.get("without")):
        outcome = simulate(made)
    return {**_figures(outcome), **(_ramp_figures(outcome) if spec["case"] == "ramp" else {})}


def scenario(spec: Spec, folder: Path) -> Scenario:
    """What a description stands for."""
    made = _ramp(spec) if spec["case"] == "ramp" else _trace(spec, folder)
    knobs = dict(spec.get("knobs", {}))
    if spec["policy"] == SLO:
        made = replace(made, loop=LoopSettings().with_values(knobs), warm=spec.get("warm", True))
    else:
        made = replace(made, knobs=knobs)
    return replace(made, router=replace(made.router, routing=Routing(spec.get("routing", Routing.KLLM))))


def _ramp(spec: Spec) -> Scenario:
    return Scenario(
        load=loads.ramp(spec.get("seed", 0)),
        objectives=Objectives(3.0, 0.1, spec.get("percentile", 99)),
        policy=spec["policy"],
        pools={Pool.ONE: PoolSetup(h100_tp2(), least=3, most=8, gpus=2)},
        starts=StartTimes(new=spec["start"]),
        router=RouterSetup(wait_seconds=600.0),
        # Without load until every law is back at its least count, which is part of llm-d's score.
        duration=loads.RAMP_SECONDS + _TAIL_SECONDS,
        sample_seconds=_SAMPLE_SECONDS,
        seed=spec.get("seed", 0),
    )


def _trace(spec: Spec, folder: Path) -> Scenario:
    trace = TRACES[spec["case"]]
    earlier = trace.middle - _WARM_UP_SECONDS * trace.speed
    begin, end = (trace.begin, trace.middle) if spec["half"] == 1 else (earlier, trace.end)
    engine = replace(PRESETS[trace.engine], flippable=spec.get("flippable", True))
    pool = PoolSetup(engine, least=1, most=trace.most, gpus=GPUS, slots=spec.get("slots", 0), initial=_INITIAL)
    return Scenario(
        load=_requests(spec["case"], trace, folder, begin, end),
        objectives=Objectives(trace.ttft, trace.tpot, spec.get("percentile", 99)),
        policy=spec["policy"],
        pools={Pool.PREFILL: pool, Pool.DECODE: pool},
        starts=StartTimes(new=spec["start"], prepare=spec["start"]),
        router=RouterSetup(wait_seconds=600.0),
        duration=(end - begin) / trace.speed,
        count_from=_WARM_UP_SECONDS,
        sample_seconds=60.0,
        seed=spec.get("seed", 0),
    )


def _requests(name: str, trace: Trace, folder: Path, begin: float, end: float) -> tuple[Planned, ...]:
    if name == "mix":
        return loads.mix(folder, begin, end)
    return loads.part(folder, name, begin, end, trace.speed, trace.scale)


def _figures(outcome: Outcome) -> dict[str, Any]:
    """What tables are made of; series and single decisions stay out."""
    document = outcome.document(with_speed=False)
    kept = ("attainment", "gpu_seconds", "mean_replicas", "peak", "flips", "starts", "cancelled", "cached_share")
    latencies = {
        name: {each: document[name][each] for each in ("p50", "p90", "p99")}
        for name in ("ttft_seconds", "tpot_seconds")
    }
    return {
        "requests": {name: count for name, count in document["requests"].items() if count},
        **{name: document[name] for name in kept},
        **latencies,
        "decisions": len(outcome.decisions),
        "cpu_seconds": round(outcome.speed.cpu_seconds, 2),
    }


def _ramp_figures(outcome: Outcome) -> dict[str, Any]:
    """Mean instances during the load, and as llm-d scores it: until the pool is back at its least count."""
    during = [_held(point) for point in outcome.series if point.at <= loads.RAMP_SECONDS]
    after = [_held(point) for point in outcome.series if point.at > loads.RAMP_SECONDS]
    until = during + after[: after.index(min(after)) + 1]
    return {"mean_during_load": round(fmean(during), 4), "mean_until_least": round(fmean(until), 4)}


def _held(point: Point) -> int:
    return sum(sum(each.values()) for each in (point.serving, point.starting, point.draining, point.idle))
