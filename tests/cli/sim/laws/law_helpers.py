"""Observations for tests of laws."""

from kllm.sim.laws.base import Bounds, EngineView, Latencies, Observation, Pool, PoolView, Setup
from kllm_core.objectives import Objectives
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming

TIMING = EngineTiming(PrefillTiming(0.0, 1e-4, 0.0), DecodeTiming(0.01, 1e-4, 1e-8))
"""10,000 prompt tokens a second, and 10 ms a step plus 0.1 ms a request."""


def setup_of(*, one=None, prefill=None, decode=None, ttft=3.0, tpot=0.1, **more):
    """A setup with bounds as (least, most)."""
    given = {Pool.ONE: one, Pool.PREFILL: prefill, Pool.DECODE: decode}
    bounds = {pool: Bounds(*limits) for pool, limits in given.items() if limits is not None}
    return Setup(bounds=bounds, objectives=Objectives(ttft, tpot), timing=TIMING, **more)


def pool_of(*engines, desired=None, starting=0, waiting=0):
    """A pool of engines; each a dict of what it has, or a number of running requests."""
    views = tuple(
        EngineView(running_requests=each) if isinstance(each, int) else EngineView(**each) for each in engines
    )
    wanted = len(views) + starting if desired is None else desired
    return PoolView(engines=views, starting=starting, desired=wanted, waiting_requests=waiting)


def seen(time, *, window=15.0, rate=1.0, ttft=None, tpot=None, tokens=1000.0, output=100.0, **pools):
    """An observation; pools by their names, latencies as one value for all percentiles."""
    return Observation(
        time=time,
        pools={Pool(name): pool for name, pool in pools.items()},
        window_seconds=window,
        arrived=round(rate * window),
        input_tokens=tokens if rate else None,
        output_tokens=output if rate else None,
        ttft=latencies(ttft),
        tpot=latencies(tpot),
    )


def latencies(value, samples=1000):
    """One value for all percentiles; None for none."""
    return None if value is None else Latencies(value, value, value, value, samples)
