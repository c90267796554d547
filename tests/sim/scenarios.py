"""Small scenarios."""

from __future__ import annotations

import numpy as np

from kllm.bench.plan import Planned
from kllm.sim.laws.base import Pool
from kllm.sim.scenario import PoolSetup, Scenario
from kllm_core.engine_model.spec import EngineSpec
from kllm_core.objectives import Objectives
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming

TIMING = EngineTiming(PrefillTiming(a=0.01, b=1e-4, k=1e-9), DecodeTiming(a=0.01, b=2e-4, c=1e-8))
ENGINE = EngineSpec(TIMING, kv_tokens=200_000, chunk_tokens=4096, block_tokens=100, flippable=True)


def poisson(rate, seconds, *, prompt=1000, output=50, seed=0, start=0.0):
    """Requests that come by chance."""
    rng = np.random.default_rng(seed)
    times = start + np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
    return tuple(Planned(index, float(at), prompt, output) for index, at in enumerate(times))


def joined(*parts):
    """Loads after one another, numbered anew."""
    requests = sorted((each for part in parts for each in part), key=lambda each: each.at)
    return tuple(
        Planned(index, each.at, each.input_tokens, each.output_tokens, each.blocks)
        for index, each in enumerate(requests)
    )


def scenario(load, policy="static:1,1", *, engine=ENGINE, least=1, most=8, gpus=1, slots=0, initial=None, **fields):
    """A service with both pools, or with one if the policy has one count."""
    setup = PoolSetup(engine, least, most, gpus, slots, initial)
    is_one = fields.pop("one", policy.startswith("static:") and "," not in policy)
    pools = {Pool.ONE: setup} if is_one else {Pool.PREFILL: setup, Pool.DECODE: setup}
    return Scenario(load, fields.pop("objectives", Objectives(1.0, 0.05, 90)), policy, pools, **fields)
