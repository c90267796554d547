"""kthena's disaggregatedTarget: a count for each role by its metrics, then the bound on their ratio. Pure.

Source: volcano-sh/kthena, pkg/autoscaler/algorithm (recommendation.go, revision.go, disaggregated_ratio.go): per role
the autoscaler's own recommendation with a tolerance of 10 %, shaped by a behaviour with a stable and a panic mode, then
`within_ratio`. One pool has no ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kllm.sim.laws.base import Bounds, Counts, Observation, Pool, PoolView, Setup
from kllm.sim.laws.behaviour import Behaviour, Policy, Rules, Shaper
from kllm.sim.laws.ratio import within_ratio
from kllm.sim.laws.recommend import Targets, per_pod


@dataclass(frozen=True)
class KthenaSettings(Targets):
    """Knobs of the policy. Seconds."""

    tolerance: float = 0.1
    least_ratio: float = 0.25
    """Prefill over decode, at least."""
    most_ratio: float = 4.0
    up_percent: float = 100.0
    up_period: float = 15.0
    panic_at: float = 2.0
    """Times the current count from which a recommendation is panic."""
    panic_percent: float = 1000.0
    panic_hold: float = 60.0
    down_percent: float = 100.0
    down_period: float = 15.0
    down_stabilisation: float = 300.0
    interval: float = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least_ratio <= self.most_ratio or self.most_ratio <= 0:
            raise ValueError(f"0 <= least_ratio <= most_ratio must hold, got {self.least_ratio} and {self.most_ratio}")


class Kthena:
    """The policy over one pool or over both."""

    def __init__(self, setup: Setup, settings: KthenaSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, settings.interval
        self._setup, self._settings = setup, settings
        down = Rules(settings.down_stabilisation, (Policy(settings.down_period, percent=settings.down_percent),))
        up = Rules(0.0, (Policy(settings.up_period, percent=settings.up_percent), Policy(settings.up_period, pods=1)))
        self._shapers = {pool: Shaper(Behaviour(up, down), bounds) for pool, bounds in setup.bounds.items()}
        self._panic_until = dict.fromkeys(setup.bounds, -math.inf)

    def decide(self, observation: Observation) -> Counts:
        """Each role by its metric, then both by their ratio."""
        counts, messages = {}, []
        for pool in self._shapers:
            counts[pool] = self._count(observation.time, pool, observation.pools[pool])
            messages.append(f"{pool}: wants {counts[pool]}")
        if Pool.ONE in counts:
            return Counts(counts, "Metric", "; ".join(messages))
        bounds = self._setup.bounds
        prefill, decode = within_ratio(
            counts[Pool.PREFILL],
            counts[Pool.DECODE],
            prefill_bounds=bounds[Pool.PREFILL],
            decode_bounds=bounds[Pool.DECODE],
            least=Fraction(str(self._settings.least_ratio)),
            most=Fraction(str(self._settings.most_ratio)),
        )
        final = {Pool.PREFILL: prefill, Pool.DECODE: decode}
        return Counts(final, "Metric" if final == counts else "Ratio", "; ".join(messages))

    def _count(self, now: float, pool: Pool, view: PoolView) -> int:
        settings, bounds = self._settings, self._setup.bounds[pool]
        current = bounds.clamp(view.desired)
        metric, target = settings.of(pool)
        values = [metric.of(engine) for engine in view.engines]
        wanted = per_pod(values, target=target, current=current, tolerance=settings.tolerance)
        return self._corrected(now, pool, current, wanted, bounds)

    def _corrected(self, now: float, pool: Pool, current: int, wanted: int, bounds: Bounds) -> int:
        stable = self._shapers[pool].shape(now, current=current, recommended=wanted)
        if wanted >= self._settings.panic_at * current:
            self._panic_until[pool] = now + self._settings.panic_hold
        if now >= self._panic_until[pool]:
            return stable
        most = current + int(current * self._settings.panic_percent / 100)
        return bounds.clamp(max(current, min(wanted, most)))
