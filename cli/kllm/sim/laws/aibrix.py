"""AIBrix's PodAutoscaler: APA and KPA, one for each pool. Pure.

Source: vllm-project/aibrix, pkg/controller/podautoscaler (algorithm/apa.go, kpa.go). With ratio = use per pod / target:
APA   ratio > 1.1: min(ceil(n·ratio), ceil(2n));  ratio < 0.9: max(ceil(n·ratio), floor(n/2)).
KPA   ceil(total / target) over a stable window of 180 s, kept within floor(n/2) and ceil(2n); when the same over the
panic window of 60 s is at least twice the ready pods, it panics: no count falls until a stable window has passed.
n is the provisioned count, pending pods included, so that calls for more repeat while pods start. A count falls only
when nothing higher was wanted for 300 s.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field

from kllm.sim.laws.base import Bounds, Counts, Observation, Pool, PoolView, Setup
from kllm.sim.laws.recommend import Metric, Targets


class Strategy(enum.StrEnum):
    """Which of its algorithms."""

    APA = "apa"
    KPA = "kpa"


@dataclass(frozen=True)
class AibrixSettings(Targets):
    """Knobs of the autoscaler. Seconds."""

    strategy: Strategy = Strategy.APA
    metric: Metric = Metric.KV
    target: float = 0.5
    prefill_metric: Metric = Metric.CONCURRENCY
    up_tolerance: float = 0.1
    down_tolerance: float = 0.1
    up_rate: float = 2.0
    down_rate: float = 2.0
    stable_window: float = 180.0
    panic_window: float = 60.0
    panic_threshold: float = 2.0
    down_cooldown: float = 300.0
    interval: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.up_rate < 1 or self.down_rate < 1:
            raise ValueError(f"rates must be at least 1, got {self.up_rate} and {self.down_rate}")


def apa(use: float, *, target: float, provisioned: int, settings: AibrixSettings) -> int:
    """Count by APA.

    Args:
        use: of the metric per pod, mean.
        target: of the same.
        provisioned: pods, those that start included.
        settings: tolerances and rates.
    """
    ratio = use / target
    if ratio > 1 + settings.up_tolerance:
        return min(math.ceil(provisioned * ratio - 1e-9), math.ceil(settings.up_rate * provisioned))
    if ratio < 1 - settings.down_tolerance:
        return max(math.ceil(provisioned * ratio - 1e-9), math.floor(provisioned / settings.down_rate))
    return provisioned


@dataclass
class _PoolState:
    """What the autoscaler of one pool remembers."""

    totals: deque[tuple[float, float]] = field(default_factory=deque)
    wanted: deque[tuple[float, int]] = field(default_factory=deque)
    panic_until: float = -math.inf
    panic_count: int = 0


class Aibrix:
    """One autoscaler for each pool."""

    def __init__(self, setup: Setup, settings: AibrixSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, settings.interval
        self._setup, self._settings = setup, settings
        self._pools = {pool: _PoolState() for pool in setup.bounds}

    def decide(self, observation: Observation) -> Counts:
        """Each pool by its own metric."""
        counts, messages = {}, []
        for pool, state in self._pools.items():
            view, bounds = observation.pools[pool], self._setup.bounds[pool]
            wanted = self._wanted(observation.time, pool, view, state, bounds)
            counts[pool] = self._cooled(observation.time, bounds.clamp(wanted), state)
            messages.append(f"{pool}: wants {wanted}")
        return Counts(counts, self._settings.strategy.upper(), "; ".join(messages))

    def _wanted(self, now: float, pool: Pool, view: PoolView, state: _PoolState, bounds: Bounds) -> int:
        metric, target = self._settings.of(pool)
        current = bounds.clamp(view.desired)
        if not view.engines:
            return current
        if self._settings.strategy is Strategy.APA:
            return apa(metric.mean(view), target=target, provisioned=current, settings=self._settings)
        state.totals.append((now, metric.mean(view) * view.serving))
        while state.totals[0][0] <= now - self._settings.stable_window:
            state.totals.popleft()
        return self._kpa(now, target, view.serving, state)

    def _kpa(self, now: float, target: float, ready: int, state: _PoolState) -> int:
        settings = self._settings
        recent = [value for at, value in state.totals if at > now - settings.panic_window]
        stable = math.ceil(sum(value for _, value in state.totals) / len(state.totals) / target - 1e-9)
        panic = math.ceil(sum(recent) / len(recent) / target - 1e-9)
        highest = max(1, math.ceil(settings.up_rate * ready))
        lowest = math.floor(ready / settings.down_rate)
        count = min(max(stable, lowest), highest)
        if panic / ready >= settings.panic_threshold:
            state.panic_until = now + settings.stable_window
        if now >= state.panic_until:
            state.panic_count = 0
            return count
        state.panic_count = max(state.panic_count, count, min(max(panic, lowest), highest))
        return state.panic_count

    def _cooled(self, now: float, count: int, state: _PoolState) -> int:
        """The highest count wanted within the cooldown."""
        state.wanted.append((now, count))
        while state.wanted[0][0] <= now - self._settings.down_cooldown and len(state.wanted) > 1:
            state.wanted.popleft()
        return max(wanted for _, wanted in state.wanted)
