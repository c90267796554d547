"""llm-d's token-aware loop: seconds of prefill backlog and shares of KV, through KEDA and an HPA. Pure.

Source: llm-d, guides/workload-autoscaling/keda-epp-token-aware:
prefill = ceil(queued uncached tokens / V_P / 1.5 s), decode = ceil(Σ KV use / 0.8); one pool takes the larger. V_P is
the chunk over the idle TTFT of one chunk. The shipped behaviour adds at most 1 in 180 s and removes at most 1 in 300 s
after 300 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kllm.sim.laws.base import Counts, Observation, Pool, PoolView, Setup
from kllm.sim.laws.behaviour import Behaviour, Policy, Rules, Shaper
from kllm.sim.laws.recommend import external


@dataclass(frozen=True)
class TokenAwareSettings:
    """Knobs of the loop, with the shipped values. Seconds."""

    backlog: float = 1.5
    """Of prefill that each instance may have before it."""
    kv_use: float = 0.8
    tolerance: float = 0.1
    up_pods: int = 1
    up_period: float = 180.0
    down_pods: int = 1
    down_period: float = 300.0
    down_stabilisation: float = 300.0
    interval: float = 15.0

    def __post_init__(self) -> None:
        if self.backlog <= 0 or self.kv_use <= 0:
            raise ValueError(f"backlog and kv_use must be above 0, got {self.backlog} and {self.kv_use}")


class TokenAware:
    """The loop; one scaled object for each pool."""

    def __init__(self, setup: Setup, settings: TokenAwareSettings) -> None:
        self.interval_seconds, self.window_seconds = settings.interval, settings.interval
        self._setup, self._settings = setup, settings
        behaviour = Behaviour(
            Rules(0.0, (Policy(settings.up_period, pods=settings.up_pods),)),
            Rules(settings.down_stabilisation, (Policy(settings.down_period, pods=settings.down_pods),)),
        )
        self._shapers = {pool: Shaper(behaviour, bounds) for pool, bounds in setup.bounds.items()}
        self._velocity = setup.chunk_tokens / setup.timing.prefill.seconds(setup.chunk_tokens)

    def decide(self, observation: Observation) -> Counts:
        """Each pool by its own triggers."""
        counts, messages = {}, []
        for pool, shaper in self._shapers.items():
            view = observation.pools[pool]
            current = self._setup.bounds[pool].clamp(view.desired)
            wanted = max(self._wanted(pool, view, current))
            counts[pool] = shaper.shape(observation.time, current=current, recommended=wanted)
            messages.append(f"{pool}: {view.queued_tokens} tokens queued, KV {view.kv_use:.2f}, wants {wanted}")
        return Counts(counts, "Tokens", "; ".join(messages))

    def _wanted(self, pool: Pool, view: PoolView, current: int) -> list[int]:
        tolerance, wanted = self._settings.tolerance, []
        if pool is not Pool.DECODE:
            seconds = view.queued_tokens / self._velocity
            wanted.append(external(seconds, target=self._settings.backlog, current=current, tolerance=tolerance))
        if pool is not Pool.PREFILL:
            target = self._settings.kv_use
            wanted.append(external(view.kv_use, target=target, current=current, tolerance=tolerance))
        return wanted
