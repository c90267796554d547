"""The least counts that a law could ask for that knows every arrival, though neither cache hits nor queues. Pure.

For each step of time it takes the arrivals themselves: their prefill seconds over a short window against what engines
can compute in it, and the requests that would be decoding at the fastest pace that so many engines keep up. That pace
must be within the objective, and their KV within the pools. It asks for the highest need until an instance that it asks
for now would serve, and no earlier.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kllm.sim.laws.base import Counts, Observation, Pool, Setup
from kllm.sim.laws.engine_rates import whole_tpot

_PACE_STEP, _PACES = 1.15, 16
"""Paces that are tried: the objective's and faster ones, each by 15 %, down to an eighth."""


@dataclass(frozen=True)
class ClairvoyantSettings:
    """Knobs: how full engines may be. Seconds."""

    utilisation: float = 0.85
    """Part of the time that prefill may take of its engines within a window."""
    tpot_share: float = 0.95
    """Part of the TPOT objective that steps may take."""
    kv_share: float = 0.95
    """Part of the KV pool that may be used."""
    window: float = 10.0
    interval: float = 5.0

    def __post_init__(self) -> None:
        for name in ("utilisation", "tpot_share", "kv_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if self.window <= 0 or self.interval <= 0:
            raise ValueError(f"window and interval must be above 0 s, got {self.window} and {self.interval}")


class Clairvoyant:
    """Knows `Setup.arrivals`."""

    def __init__(self, setup: Setup, settings: ClairvoyantSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, settings.interval
        self._setup, self._settings = setup, settings
        self._needs = {pool: self._need_over_time(pool) for pool in setup.bounds}

    def decide(self, observation: Observation) -> Counts:
        """The highest need from now until what is asked for next would serve."""
        first = math.floor(observation.time / self._settings.interval)
        ahead = math.ceil((self._setup.start_seconds + self._settings.interval) / self._settings.interval)
        counts = {}
        for pool, bounds in self._setup.bounds.items():
            needs = self._needs[pool][first : first + ahead + 1]
            counts[pool] = bounds.clamp(max(needs, default=bounds.least))
        return Counts(counts, "Known")

    def _need_over_time(self, pool: Pool) -> list[int]:
        arrivals, settings = self._setup.arrivals, self._settings
        if not arrivals:
            return []
        steps = math.ceil((arrivals[-1].time + settings.window) / settings.interval) + 1
        times = [each.time for each in arrivals]
        work = list(accumulate((self._setup.timing.prefill.seconds(each.input_tokens) for each in arrivals), initial=0))
        slowest = self._setup.objectives.tpot_seconds * settings.tpot_share
        paces = [slowest / _PACE_STEP**power for power in range(_PACES)][::-1] if pool is not Pool.PREFILL else []
        decoding = {pace: _decoding(self._setup, steps, settings.interval, pace) for pace in paces}
        needs = []
        for step in range(steps):
            begin = step * settings.interval
            span = bisect_left(times, begin), bisect_left(times, begin + settings.window)
            busy = (work[span[1]] - work[span[0]]) / settings.window if pool is not Pool.DECODE else 0.0
            at_paces = [(pace, batch[step], kv[step]) for pace, (batch, kv) in decoding.items()]
            needs.append(self._need(pool, busy, at_paces))
        return needs

    def _need(self, pool: Pool, busy: float, at_paces: Sequence[tuple[float, float, float]]) -> int:
        bounds = self._setup.bounds[pool]
        for count in range(max(1, bounds.least), bounds.most):
            if busy <= count * self._settings.utilisation and (
                pool is Pool.PREFILL or self._fits(count, busy, at_paces)
            ):
                return count
        return bounds.most

    def _fits(self, count: int, busy: float, at_paces: Sequence[tuple[float, float, float]]) -> bool:
        """Whether so many engines keep up the fastest pace that they can, and hold the KV of that."""
        for pace, batch, kv in at_paces:
            step = whole_tpot(self._setup, batch=batch / count, kv_tokens=kv / count, prefill_share=busy / count)
            if step <= pace:
                return kv <= count * self._settings.kv_share * self._setup.kv_total_tokens
        return False


def _decoding(setup: Setup, steps: int, interval: float, pace: float) -> tuple[list[float], list[float]]:
    """Requests that decode at each step, and their KV tokens, when each token takes `pace` seconds."""
    batch, kv = [0.0] * (steps + 1), [0.0] * (steps + 1)
    for each in setup.arrivals:
        begin = each.time + setup.timing.prefill.seconds(each.input_tokens)
        first = min(steps, math.ceil(begin / interval))
        last = min(steps, math.ceil((begin + each.output_tokens * pace) / interval))
        held = each.input_tokens + each.output_tokens / 2
        batch[first] += 1
        batch[last] -= 1
        kv[first] += held
        kv[last] -= held
    return list(accumulate(batch)), list(accumulate(kv))
