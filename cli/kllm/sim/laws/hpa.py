"""The Kubernetes HorizontalPodAutoscaler, one for each pool. Pure.

Sources: `recommend` and `behaviour` name them. Defaults of Kubernetes: sync period 15 s, tolerance 0.1, down
stabilisation 300 s, up at most the larger of 100 % and 4 pods in 15 s. Metrics and targets are a user's choice: here
requests per engine, or a queue, as the guides of serving systems have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kllm.sim.laws.base import Counts, Observation, Setup
from kllm.sim.laws.behaviour import Behaviour, Shaper
from kllm.sim.laws.recommend import Targets, per_pod


@dataclass(frozen=True)
class HpaSettings(Targets):
    """Knobs of the autoscaler. Seconds."""

    tolerance: float = 0.1
    up_stabilisation: float = 0.0
    down_stabilisation: float = 300.0
    interval: float = 15.0


class Hpa:
    """One autoscaler for each pool; none knows of the other."""

    def __init__(self, setup: Setup, settings: HpaSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, settings.interval
        self._setup, self._settings = setup, settings
        behaviour = Behaviour.stabilised(up_seconds=settings.up_stabilisation, down_seconds=settings.down_stabilisation)
        self._shapers = {pool: Shaper(behaviour, bounds) for pool, bounds in setup.bounds.items()}

    def decide(self, observation: Observation) -> Counts:
        """Each pool by its own metric."""
        counts, messages = {}, []
        for pool, shaper in self._shapers.items():
            view = observation.pools[pool]
            current = self._setup.bounds[pool].clamp(view.desired)
            metric, target = self._settings.of(pool)
            values = [metric.of(engine) for engine in view.engines]
            wanted = per_pod(values, target=target, current=current, tolerance=self._settings.tolerance)
            counts[pool] = shaper.shape(observation.time, current=current, recommended=wanted)
            messages.append(f"{pool}: {metric} {metric.mean(view):.2f} of {target:g} wants {wanted}")
        return Counts(counts, "Metric", "; ".join(messages))
