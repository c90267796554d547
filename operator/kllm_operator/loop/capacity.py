"""When capacity changed, and what changes of it took. No clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kllm_core.fleet import Fleet
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_core.timing import EngineTiming
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.demand import Forecast, known

_REMEMBERED = 3
"""Changes whose mean time counts: the machine's state changes, and one may have been slow by chance."""
_FIRST_SWITCH_SECONDS = 0.75
"""Assumed before the first switch of a role: SGLang takes half a second to one."""
_QUIET_SECONDS = 0.5
"""That an agent waits before it calls an empty instance drained."""
_CACHE_SECONDS = 60.0
"""Time in which what hits a prefix cache would be computed again elsewhere."""


@dataclass(frozen=True)
class Arrival:
    """An instance that began to serve.

    Attributes:
        how: Start or Flip.
        seconds: from the decision until it served; None when the loop did not decide it.
        source: of a start that the loop decided.
    """

    instance_id: str
    role: Role
    how: str
    seconds: float | None
    source: StartFrom | None = None


@dataclass
class _Decided:
    role: Role
    how: str
    at: float
    source: StartFrom


def _few() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass
class CapacityBook:
    """What the loop saw of its own steps.

    Attributes:
        prior_start_seconds: what new starts took before the loop began; None is unknown.
    """

    prior_start_seconds: float | None = None
    _starts: dict[StartFrom, deque[float]] = field(default_factory=lambda: {source: _few() for source in StartFrom})
    _drains: dict[Role, deque[float]] = field(default_factory=lambda: {role: _few() for role in Role})
    _switches: deque[float] = field(default_factory=_few)
    _changed_at: dict[Role, float] = field(default_factory=dict)
    _serving: dict[Role, frozenset[str]] | None = None
    _decided: dict[str, _Decided] = field(default_factory=dict)

    def decided(self, instance_id: str, role: Role, how: str, *, at: float, source: StartFrom = StartFrom.NEW) -> None:
        """An instance shall serve a role."""
        self._decided[instance_id] = _Decided(role, how, at, source)

    def forget(self, instance_id: str) -> None:
        """It will not."""
        self._decided.pop(instance_id, None)

    def drained(self, role: Role, seconds: float) -> None:
        """A drain has ended with an empty instance."""
        self._drains[role].append(seconds)

    def switched(self, seconds: float) -> None:
        """A role was switched."""
        self._switches.append(seconds)

    def observe(self, fleet: Fleet, *, now: float) -> list[Arrival]:
        """See who serves; returns who began to."""
        serving = {role: frozenset(each.id for each in fleet.serving(role)) for role in Role}
        before, self._serving = self._serving, serving
        if before is None:
            return []
        arrivals = []
        for role in Role:
            if serving[role] != before[role]:
                self._changed_at[role] = now
            arrivals += [self._arrived(each, role, now) for each in sorted(serving[role] - before[role])]
        return arrivals

    def changed_age_seconds(self, role: Role, *, now: float) -> float | None:
        """Since an instance of a role began or ceased to serve; None: not within memory."""
        at = self._changed_at.get(role)
        return None if at is None else now - at

    def start_seconds(self, source: StartFrom = StartFrom.NEW) -> float | None:
        """From the decision until an instance serves; one that comes from elsewhere counts as new until measured."""
        return _mean(self._starts[source]) or _mean(self._starts[StartFrom.NEW]) or self.prior_start_seconds

    def times(
        self,
        donor: Role,
        *,
        forecast: Forecast,
        timing: EngineTiming,
        fleet: Fleet,
        source: StartFrom = StartFrom.NEW,
    ) -> CapacityTimes:
        """What a change costs now, if the donor gives an instance.

        Args:
            donor: the role that would give.
            forecast: says how long requests are, and what caches spare.
            timing: of the engines.
            fleet: says how much is cached.
            source: from where an instance would start instead.
        """
        return CapacityTimes(
            start_seconds=self.start_seconds(source),
            drain_seconds=_mean(self._drains[donor]) or _QUIET_SECONDS + _request_seconds(donor, forecast, timing),
            switch_seconds=_mean(self._switches) or _FIRST_SWITCH_SECONDS,
            lost_cache_seconds=_lost_cache_seconds(donor, forecast, timing, fleet),
        )

    def _arrived(self, instance_id: str, role: Role, now: float) -> Arrival:
        decided = self._decided.pop(instance_id, None)
        if decided is None:
            return Arrival(instance_id, role, "Start", None)
        seconds = now - decided.at
        if decided.how != "Start":
            return Arrival(instance_id, role, decided.how, seconds)
        self._starts[decided.source].append(seconds)
        return Arrival(instance_id, role, decided.how, seconds, decided.source)


def _mean(seconds: deque[float]) -> float | None:
    return sum(seconds) / len(seconds) if seconds else None


def _request_seconds(role: Role, forecast: Forecast, timing: EngineTiming) -> float:
    """What the last request of a drain takes, without queues."""
    prompt = math.ceil(known(forecast.uncached_tokens) or 0)
    if role is Role.PREFILL:
        return timing.prefill.seconds(prompt)
    return (known(forecast.output_tokens) or 0.0) * timing.decode.seconds(1, prompt)


def _lost_cache_seconds(donor: Role, forecast: Forecast, timing: EngineTiming, fleet: Fleet) -> float:
    """Prefill time that the donor's prefix cache spares until another has it; decode computes no prompts."""
    if donor is Role.DECODE:
        return 0.0
    serving = fleet.serving(donor)
    evictable = [each.load.kv_evictable_tokens for each in serving if each.load and each.load.kv_evictable_tokens]
    hits = (known(forecast.cached_tokens) or 0.0) * (known(forecast.requests_per_second) or 0.0)
    spared = hits * _CACHE_SECONDS / max(1, len(serving))
    return timing.prefill.b * min(spared, max(evictable, default=0))
