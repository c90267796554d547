"""llm-d's SLO-aware loop: worst latency over its objective, predicted where possible, through KEDA and an HPA. Pure.

Source: llm-d, guides/workload-autoscaling/slo-aware (README and BENCHMARK.md):
s = mean over 45 s of min(max(P90 TTFT / S_ttft, P90 TPOT / S_tpot), 2), the percentiles from histograms over one
minute, rules each 15 s, no traffic counts as 0. With n provisioned and r ready instances and c = r/n:
up   n + ceil(n·(s·c/0.55 - 1))  if s > 0.55,  down  n - floor(n·(1 - s/0.40))  if s < 0.40.
The HPA lets it grow by the larger of 100 % and 4 pods in 60 s after 30 s, and shrink by 1 in 120 s after 180 s. For two
pools the guide names TTFT for prefill and TPOT for decode as future work; that is what this does there.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kllm.sim.laws.base import Counts, Latencies, Observation, Pool, PoolView, Setup
from kllm.sim.laws.behaviour import Behaviour, Policy, Rules, Shaper
from kllm.sim.laws.histogram import TPOT_BOUNDS, TTFT_BOUNDS, quantile
from kllm.sim.laws.predicted_latency import predicted
from kllm.sim.laws.recommend import external

_RULE_SECONDS = 15.0
_PERCENTILE = 0.9
_LEAST_SAMPLES = 100


class Signal(enum.StrEnum):
    """Where latencies come from."""

    PREDICTED = "predicted"
    """A trained predictor."""
    COLD = "cold"
    """A predictor that trains from the run's first request on: nothing above what it has seen."""
    MEASURED = "measured"
    """No predictor: what requests met."""


class Statistic(enum.StrEnum):
    """What of the latencies counts."""

    HISTOGRAM = "histogram"
    """P90, as the buckets of a histogram tell it."""
    EXACT = "exact"
    """P90 of the values themselves."""
    MEAN = "mean"


@dataclass(frozen=True)
class LlmDSettings:
    """Knobs of the loop, with the values of its benchmark. Seconds."""

    signal: Signal = Signal.PREDICTED
    statistic: Statistic = Statistic.HISTOGRAM
    up_above: float = 0.55
    down_below: float = 0.40
    cap: float = 2.0
    smoothing: float = 45.0
    window: float = 60.0
    up_percent: float = 100.0
    up_pods: int = 4
    up_period: float = 60.0
    up_stabilisation: float = 30.0
    down_pods: int = 1
    down_period: float = 120.0
    down_stabilisation: float = 180.0
    tolerance: float = 0.1
    scrape: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.down_below <= self.up_above < self.cap:
            raise ValueError(
                f"0 < down_below <= up_above < cap must hold, got {self.down_below}, {self.up_above}, {self.cap}"
            )


def desired(saturation: float, *, provisioned: int, ready: int, settings: LlmDSettings) -> int:
    """The formula's count.

    Args:
        saturation: the smoothed signal; 1.0 is the objective.
        provisioned: instances that serve or start.
        ready: those that serve.
        settings: the thresholds.
    """
    if saturation > settings.up_above:
        credit = ready / provisioned if 0 < ready < provisioned else 1.0
        return provisioned + math.ceil(provisioned * (saturation * credit / settings.up_above - 1) - 1e-9)
    if saturation < settings.down_below:
        return provisioned - math.floor(provisioned * (1 - saturation / settings.down_below) + 1e-9)
    return provisioned


@dataclass
class _PoolState:
    """What the recording rules of one pool remember."""

    shaper: Shaper
    ttft: deque[tuple[float, float]] = field(default_factory=deque)
    tpot: deque[tuple[float, float]] = field(default_factory=deque)
    saturation: deque[tuple[float, float]] = field(default_factory=deque)


class LlmD:
    """The loop; one for each pool."""

    def __init__(self, setup: Setup, settings: LlmDSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.scrape, settings.window
        self._setup, self._settings = setup, settings
        behaviour = Behaviour(
            Rules(
                settings.up_stabilisation,
                (
                    Policy(settings.up_period, percent=settings.up_percent),
                    Policy(settings.up_period, pods=settings.up_pods),
                ),
            ),
            Rules(settings.down_stabilisation, (Policy(settings.down_period, pods=settings.down_pods),)),
        )
        self._pools = {pool: _PoolState(Shaper(behaviour, bounds)) for pool, bounds in setup.bounds.items()}
        self._next_rule = 0.0
        self._seen_ttft = self._seen_tpot = 0.0
        self._samples = 0

    def decide(self, observation: Observation) -> Counts:
        """Scrape; every 15 s evaluate the rules and the formula."""
        now = observation.time
        self._learn(observation)
        for pool, state in self._pools.items():
            self._scrape(now, observation, pool, state)
        counts = {pool: self._setup.bounds[pool].clamp(observation.pools[pool].desired) for pool in self._pools}
        if now < self._next_rule:
            return Counts(counts, "BetweenRules")
        self._next_rule = now + _RULE_SECONDS
        messages = []
        for pool, state in self._pools.items():
            saturation = self._saturation(now, observation, pool, state)
            counts[pool] = self._count(now, observation.pools[pool], counts[pool], saturation, state.shaper)
            messages.append(f"{pool}: saturation {saturation:.2f}")
        return Counts(counts, "Saturation", "; ".join(messages))

    def _count(self, now: float, view: PoolView, current: int, saturation: float, shaper: Shaper) -> int:
        wanted = desired(saturation, provisioned=current, ready=view.serving, settings=self._settings)
        # KEDA hands the formula's count to the HPA as a metric with target 1 per pod.
        wanted = external(wanted, target=1.0, current=current, tolerance=self._settings.tolerance)
        return shaper.shape(now, current=current, recommended=wanted)

    def _learn(self, observation: Observation) -> None:
        for latencies in (observation.ttft, observation.tpot):
            self._samples = max(self._samples, latencies.samples if latencies else 0)
        self._seen_ttft = max(self._seen_ttft, observation.ttft.p99 if observation.ttft else 0.0)
        self._seen_tpot = max(self._seen_tpot, observation.tpot.p99 if observation.tpot else 0.0)

    def _scrape(self, now: float, observation: Observation, pool: Pool, state: _PoolState) -> None:
        if self._settings.signal is not Signal.MEASURED and observation.arrived:
            told = predicted(self._setup, observation, pool)
            cold = self._settings.signal is Signal.COLD
            for value, seen, history in (
                (told.ttft, self._seen_ttft, state.ttft),
                (told.tpot, self._seen_tpot, state.tpot),
            ):
                if value is not None and not (cold and self._samples < _LEAST_SAMPLES):
                    history.append((now, min(value, seen) if cold else value))
        for history in (state.ttft, state.tpot):
            while history and history[0][0] <= now - self._settings.window:
                history.popleft()

    def _saturation(self, now: float, observation: Observation, pool: Pool, state: _PoolState) -> float:
        """The smoothed signal of one pool."""
        ratios = []
        if pool is not Pool.DECODE:
            ttft = self._statistic(state.ttft, observation.ttft, TTFT_BOUNDS)
            ratios.append(ttft / self._setup.objectives.ttft_seconds)
        if pool is not Pool.PREFILL:
            tpot = self._statistic(state.tpot, observation.tpot, TPOT_BOUNDS)
            ratios.append(tpot / self._setup.objectives.tpot_seconds)
        state.saturation.append((now, min(max(ratios), self._settings.cap)))
        while state.saturation[0][0] <= now - self._settings.smoothing:
            state.saturation.popleft()
        return sum(value for _, value in state.saturation) / len(state.saturation)

    def _statistic(
        self, history: deque[tuple[float, float]], measured: Latencies | None, bounds: Sequence[float]
    ) -> float:
        """Of what was predicted, else of what was measured; 0 without either."""
        values = [value for _, value in history] or (list(measured.values) if measured is not None else [])
        if not values:
            return measured.p90 if measured is not None and measured.samples else 0.0
        match self._settings.statistic:
            case Statistic.HISTOGRAM:
                return quantile(_PERCENTILE, values, bounds)
            case Statistic.EXACT:
                return sorted(values)[math.ceil(_PERCENTILE * len(values)) - 1]
            case Statistic.MEAN:
                return sum(values) / len(values)
