"""llm-d's workload variant autoscaler, its saturation analysis, one for each pool. Pure.

Source: llm-d-autoscaling, internal/engines/analyzers/saturation_v2 (final version 0.9): demand and supply in tokens of
KV; an engine supplies 80 % of its pool, those that start are anticipated.
up   required = max(0, demand / 0.85 - anticipated supply),  down  spare = max(0, supply - demand / 0.70).
A count grows by what is required and falls by whole engines of what is spare; the HPA before it stabilises both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kllm.sim.laws.base import Counts, Observation, PoolView, Setup
from kllm.sim.laws.behaviour import Behaviour, Shaper


@dataclass(frozen=True)
class WvaSettings:
    """Knobs of the analysis. Seconds."""

    up_above: float = 0.85
    down_below: float = 0.70
    kv_share: float = 0.8
    """Part of an engine's KV pool that counts as its supply."""
    up_stabilisation: float = 30.0
    down_stabilisation: float = 300.0
    interval: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.down_below < self.up_above <= 1 or not 0 < self.kv_share <= 1:
            raise ValueError(
                "0 < down_below < up_above <= 1 and 0 < kv_share <= 1 must hold, "
                f"got {self.down_below}, {self.up_above} and {self.kv_share}"
            )


class Wva:
    """One analysis for each pool."""

    def __init__(self, setup: Setup, settings: WvaSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, 60.0
        self._setup, self._settings = setup, settings
        behaviour = Behaviour.stabilised(up_seconds=settings.up_stabilisation, down_seconds=settings.down_stabilisation)
        self._shapers = {pool: Shaper(behaviour, bounds) for pool, bounds in setup.bounds.items()}

    def decide(self, observation: Observation) -> Counts:
        """Each pool by its own saturation."""
        counts, messages = {}, []
        for pool, shaper in self._shapers.items():
            view = observation.pools[pool]
            current = self._setup.bounds[pool].clamp(view.desired)
            wanted = current + self._change(view)
            counts[pool] = shaper.shape(observation.time, current=current, recommended=wanted)
            messages.append(f"{pool}: wants {wanted}")
        return Counts(counts, "Saturation", "; ".join(messages))

    def _change(self, view: PoolView) -> int:
        if not view.engines:
            return 0
        totals = [engine.kv_total_tokens or self._setup.kv_total_tokens for engine in view.engines]
        one = self._settings.kv_share * sum(totals) / len(totals)
        demand = sum(engine.kv_used_tokens for engine in view.engines) + view.queued_tokens
        required = demand / self._settings.up_above - one * (view.serving + view.starting)
        if required > 0:
            return math.ceil(required / one - 1e-9)
        spare = one * view.serving - demand / self._settings.down_below
        return -math.floor(spare / one + 1e-9) if spare > 0 and not view.starting else 0
