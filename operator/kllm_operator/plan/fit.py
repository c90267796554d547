"""How long an engine's steps really take, learned while it runs. Pure.

A common factor per role is learned at once, from the first report on; the single coefficients as far as steps of
different sizes were seen. Both are bounded, so that no report can turn a forecast upside down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from kllm_core.fleet import EngineLoad, Fleet
from kllm_core.objectives import Role
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming
from kllm_operator.plan.demand import Forecast, known
from kllm_operator.plan.spots import Key, Spots

_WEIGHT = 0.1
"""Part of a new report in the common factor: with one each second and instance, about the last ten seconds count."""
_MOST_FACTOR = 200.0
"""A small model on a processor is some ten times slower than the prior, and a fast GPU as many times faster."""


@dataclass(frozen=True)
class Fit:
    """The prior and the factors by which steps take longer; None is not learned yet.

    Attributes:
        exact: steps are known to last as the prior says, so that nothing is learned.
        prefill: common factor of the role.
        prefills: steps by their size.
    """

    prior: EngineTiming
    exact: bool = False
    prefill: float | None = None
    decode: float | None = None
    prefills: Spots = field(default_factory=Spots)
    decodes: Spots = field(default_factory=Spots)

    @cached_property
    def timing(self) -> EngineTiming:
        """The prior, as slow as steps really are."""
        prefill, decode = self.prefill or 1.0, self.decode or 1.0
        p, d = self.prior.prefill, self.prior.decode
        p_factors = self.prefills.factors(prefill) or (prefill,) * 3
        d_factors = self.decodes.factors(decode) or (decode,) * 3
        return EngineTiming(
            PrefillTiming(p.a * p_factors[0], p.b * p_factors[1], p.k * p_factors[2]),
            DecodeTiming(d.a * d_factors[0], d.b * d_factors[1], d.c * d_factors[2]),
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
        loads = [each.load for role in Role for each in fleet.serving(role) if each.load is not None]
        fresh = [each for each in loads if each.age_seconds <= fresh_seconds]
        prefill, prefills = _learned(self.prefill, self.prefills, self._prefill_steps(fresh, forecast))
        decode, decodes = _learned(self.decode, self.decodes, self._decode_steps(fresh))
        return replace(self, prefill=prefill, prefills=prefills, decode=decode, decodes=decodes)

    def _prefill_steps(self, loads: Iterable[EngineLoad], forecast: Forecast) -> Iterable[_Step]:
        new, cached = known(forecast.uncached_tokens), known(forecast.cached_tokens) or 0.0
        if not new:
            return
        prior = self.prior.prefill
        pairs = new * (new + 2 * cached) * (1 + (known(forecast.prompt_variation) or 0.0))
        parts = (prior.a, prior.b * new, prior.k * pairs)
        for load in loads:
            if rate := known(load.prefill_tokens_per_second):
                yield _Step((_size(new), _size(cached)), parts, new / rate)

    def _decode_steps(self, loads: Iterable[EngineLoad]) -> Iterable[_Step]:
        prior = self.prior.decode
        for load in loads:
            seconds, batch, kv = known(load.decode_step_seconds), load.running_requests, load.kv_used_tokens
            if seconds and batch and batch > 0 and kv is not None and kv >= 0:
                yield _Step((_size(batch), _size(kv)), (prior.a, prior.b * batch, prior.c * kv), seconds)


@dataclass(frozen=True)
class _Step:
    key: Key
    parts: tuple[float, ...]
    seconds: float


def _size(count: float) -> int:
    """Sizes within a factor of about 1.5 are one."""
    return round(math.log2(1 + count) / 0.6)


def _learned(before: float | None, spots: Spots, steps: Iterable[_Step]) -> tuple[float | None, Spots]:
    mean, spots = before, spots.faded()
    for step in steps:
        foreseen = sum(step.parts)
        if foreseen <= 0:
            continue
        factor = min(max(step.seconds / foreseen, 1 / _MOST_FACTOR), _MOST_FACTOR)
        # Of logarithms, so that a step of twice the time and one of half of it weigh the same.
        mean = factor if mean is None else math.exp((1 - _WEIGHT) * math.log(mean) + _WEIGHT * math.log(factor))
        spots = spots.seen(step.key, step.parts, factor * foreseen)
    return mean, spots
