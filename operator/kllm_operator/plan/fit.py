"""How far an engine's steps are from the prior, learned while it runs. Pure.

One factor per role is learned, not each coefficient: the loads of one machine hardly ever span what three unknowns
need, and a factor cannot turn a forecast upside down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kllm_core.fleet import EngineLoad, Fleet
from kllm_core.objectives import Role
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming
from kllm_operator.plan.demand import Forecast, known

_WEIGHT = 0.1
"""Part of a new report in the mean: with one each second and instance, about the last ten seconds count."""
_MOST_FACTOR = 200.0
"""A small model on a processor is some ten times slower than the prior, and a fast GPU as many times faster."""


@dataclass(frozen=True)
class Fit:
    """The prior and the factors by which steps take longer; None is not learned yet.

    Attributes:
        exact: steps are known to last as the prior says, so that nothing is learned.
    """

    prior: EngineTiming
    exact: bool = False
    prefill: float | None = None
    decode: float | None = None

    @property
    def timing(self) -> EngineTiming:
        """The prior, as slow as steps really are."""
        prefill, decode = self.prefill or 1.0, self.decode or 1.0
        p, d = self.prior.prefill, self.prior.decode
        return EngineTiming(
            PrefillTiming(p.a * prefill, p.b * prefill, p.k * prefill),
            DecodeTiming(d.a * decode, d.b * decode, d.c * decode),
        )

    def learn(self, fleet: Fleet, forecast: Forecast, *, fresh_seconds: float) -> Fit:
        """Take what engines told since the last time.

        Args:
            fleet: with loads.
            forecast: says how long a prompt is.
            fresh_seconds: older loads were taken already.
        """
        if self.exact:
            return self
        loads = {
            role: [each.load for each in fleet.serving(role) if each.load and each.load.age_seconds <= fresh_seconds]
            for role in Role
        }
        prompt = known(forecast.uncached_tokens)
        return replace(
            self,
            prefill=_mean(self.prefill, self._prefill_factors(loads[Role.PREFILL], prompt)),
            decode=_mean(self.decode, self._decode_factors(loads[Role.DECODE])),
        )

    def _prefill_factors(self, loads: Iterable[EngineLoad], prompt: float | None) -> Iterable[float]:
        if not prompt:
            return
        per_token = self.prior.prefill.seconds(math.ceil(prompt)) / math.ceil(prompt)
        for load in loads:
            if rate := known(load.prefill_tokens_per_second):
                yield 1 / rate / per_token

    def _decode_factors(self, loads: Iterable[EngineLoad]) -> Iterable[float]:
        for load in loads:
            step = known(load.decode_step_seconds)
            if step and load.running_requests and load.kv_used_tokens is not None:
                yield step / self.prior.decode.seconds(load.running_requests, load.kv_used_tokens)


def _mean(before: float | None, factors: Iterable[float]) -> float | None:
    mean = before
    for factor in factors:
        bounded = min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)
        # Of logarithms, so that a step of twice the time and one of half of it weigh the same.
        mean = bounded if mean is None else math.exp((1 - _WEIGHT) * math.log(mean) + _WEIGHT * math.log(bounded))
    return mean
