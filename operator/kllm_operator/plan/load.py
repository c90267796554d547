"""Load per role, now and for any other count of instances: 1.0 is the boundary of the objective. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kllm_core.fleet import EngineLoad, Fleet
from kllm_core.objectives import Load, Objectives, Role
from kllm_core.timing import PRIOR, EngineTiming
from kllm_operator.plan.congestion import blocked, full
from kllm_operator.plan.demand import Demand, Measurement, known
from kllm_operator.plan.queueing import decode_batch, waiting_seconds
from kllm_operator.plan.role_load import RoleLoad, Term, TermLoad
from kllm_operator.plan.settings import LoadSettings

_MOST_LOAD = 1000.0
"""Loads are cut here, so that an overload stays a number and orders with others."""


@dataclass(frozen=True)
class LoadModel:
    """Everything that load follows from, at one moment."""

    objectives: Objectives
    fleet: Fleet
    demand: Demand
    timing: EngineTiming = PRIOR
    settings: LoadSettings = field(default_factory=LoadSettings)

    def now(self, role: Role) -> RoleLoad:
        """Load of the instances that serve now, with all that is queued there."""
        return self._judge(role, len(self.fleet.serving(role)), present=True)

    def at(self, role: Role, count: int) -> RoleLoad:
        """Forecast load if `count` instances served; none is judged as one.

        What is queued for prefill has the whole horizon to be worked off: a new instance that comes when the queue is
        gone helps nobody.
        """
        return self._judge(role, count, present=False)

    def _judge(self, role: Role, count: int, *, present: bool) -> RoleLoad:
        count = max(1, count)
        terms = (self._prefill(count, present=present),) if role is Role.PREFILL else self._decode(count)
        judged = [(term.strain, term) for term in terms if term.strain is not None]
        if not judged:
            return RoleLoad(
                role, count, Load.of(predicted=None, measured=None), None, None, complete=False, terms=terms
            )
        strain, decided = max(judged, key=lambda pair: pair[0])
        return RoleLoad(role, count, decided.load, strain, decided.term, self._complete(role), terms)

    def _prefill(self, count: int, *, present: bool) -> TermLoad:
        objective = self.objectives.ttft_seconds * self.settings.prefill_share
        own = self._own_prefill_seconds()
        measured = self._sum(Role.PREFILL, self.demand.stages.queue, self.demand.stages.prefill)
        if measured is not None:
            measured = max(0.0, measured - (self._believed(Role.PREFILL, self.demand.stages.blocked) or 0.0))
        predicted = self._prefill_seconds(count, present=present)
        return self._term(Term.QUEUE_AND_PREFILL, Role.PREFILL, count, objective, predicted, measured, own or 0.0)

    def _prefill_seconds(self, count: int, *, present: bool) -> float | None:
        rate, own = self._rate(), self._own_prefill_seconds()
        queued = [load.queued_uncached_tokens for load in self._fresh(Role.PREFILL) if not blocked(load)]
        tokens = math.ceil(_total(queued) / count)
        drain = self.timing.prefill.drain_seconds(tokens, chunk_tokens=self.settings.chunk_tokens)
        forecast, horizon = self.demand.forecast, self.settings.horizon_seconds
        mean = known(forecast.uncached_tokens)
        if rate is None or own is None or not mean or rate == tokens == 0:
            return drain + (own or 0.0) if tokens or rate == 0 else None
        if not present:
            rate, drain = rate + _total(queued) / (mean * horizon), 0.0
        service = self.timing.prefill.seconds(math.ceil(mean), math.ceil(known(forecast.cached_tokens) or 0))
        wait = waiting_seconds(
            requests_per_second=rate,
            service_seconds=service,
            servers=count,
            percentile=self.objectives.percentile,
            saturation=self.settings.saturation,
            horizon_seconds=horizon,
        )
        return max(wait, drain) + own  # two views of one queue

    def _own_prefill_seconds(self) -> float | None:
        forecast = self.demand.forecast
        mean, long = known(forecast.uncached_tokens), known(forecast.long_uncached_tokens)
        if mean is None:
            return None
        return self.timing.prefill.seconds(
            math.ceil(max(mean, long or 0)), math.ceil(known(forecast.cached_tokens) or 0)
        )

    def _decode(self, count: int) -> tuple[TermLoad, ...]:
        loads = list(self._fresh(Role.DECODE))
        running = _total(load.running_requests for load in loads) if loads else None
        used = _total(load.kv_used_tokens for load in loads) if loads else None
        batch = self._forecast_batch(count)
        context = self._context_tokens()
        return (
            self._tpot(count, batch, running, used),
            self._handover(count, running),
            self._kv(count, loads, used, None if batch is None or context is None else batch * context),
        )

    def _tpot(self, count: int, batch: float | None, running: int | None, used: int | None) -> TermLoad:
        objective, context = self.objectives.tpot_seconds, self._context_tokens() or 0.0
        seconds: list[float] = []
        if running is not None and used is not None:
            seconds.append(self._tpot_seconds(running / count, used / count))
        if batch is not None:
            seconds.append(self._tpot_seconds(batch, batch * context))
        floor = self._tpot_seconds(1, context)
        measured = self._believed(Role.DECODE, self.demand.stages.tpot)
        return self._term(Term.TPOT, Role.DECODE, count, objective, max(seconds, default=None), measured, floor)

    def _handover(self, count: int, running: int | None) -> TermLoad:
        objective = self.objectives.ttft_seconds * (1 - self.settings.prefill_share)
        stages = self.demand.stages
        # What the way itself takes; only waiting for room, on either side, shrinks with more instances.
        way = self._sum(Role.DECODE, stages.bind, stages.transfer, stages.first_step)
        waits = self._sum(Role.DECODE, stages.blocked, stages.admission)
        measured = None if way is None and waits is None else (way or 0.0) + (waits or 0.0)
        predicted = self._room_seconds(count, running)
        return self._term(Term.HANDOVER, Role.DECODE, count, objective, predicted, measured, way or 0.0)

    def _room_seconds(self, count: int, running: int | None) -> float | None:
        """Until what waits for room on decode has got it, at the rate at which requests end."""
        output = known(self.demand.forecast.output_tokens)
        parked = [load for load in self._fresh(Role.PREFILL) if blocked(load)]
        held = _total(load.parked_requests for load in parked) + _total(load.queued_requests for load in parked)
        held += _total(load.queued_requests for load in self._fresh(Role.DECODE) if full(load))
        serving = len(self.fleet.serving(Role.DECODE))
        if not held or not running or not output or not serving:
            return None
        used = _total(load.kv_used_tokens for load in self._fresh(Role.DECODE))
        ends_per_second = running / serving / (output * self._tpot_seconds(running / serving, used / serving))
        return held / (ends_per_second * count)

    def _kv(self, count: int, loads: list[EngineLoad], used: int | None, forecast: float | None) -> TermLoad:
        waters = [load.kv_high_water_tokens for load in loads if load.kv_high_water_tokens]
        tokens = [value for value in (None if used is None else used / count, forecast) if value is not None]
        predicted = max(tokens) if waters and tokens else None
        return self._term(Term.KV, Role.DECODE, count, float(min(waters, default=1)), predicted, None, 0.0)

    def _forecast_batch(self, count: int) -> float | None:
        rate, output, context = self._rate(), known(self.demand.forecast.output_tokens), self._context_tokens()
        if rate == 0:
            return 0.0
        if rate is None or not output or context is None:
            return None
        return decode_batch(
            self.timing.decode,
            requests_per_second=rate,
            output_tokens=output,
            context_tokens=context,
            accept_length=self._accept_length(),
            servers=count,
            percentile=self.objectives.percentile,
            saturation=self.settings.saturation,
            horizon_seconds=self.settings.horizon_seconds,
        )

    def _tpot_seconds(self, batch: float, kv_tokens: float) -> float:
        return self.timing.decode.tpot_seconds(
            math.ceil(batch), math.ceil(kv_tokens), accept_length=self._accept_length()
        )

    def _accept_length(self) -> float:
        return max(1.0, known(self.demand.forecast.accept_length) or 1.0)

    def _context_tokens(self) -> float | None:
        forecast = self.demand.forecast
        prompt, output = known(forecast.uncached_tokens), known(forecast.output_tokens)
        if prompt is None or output is None:
            return None
        return prompt + (known(forecast.cached_tokens) or 0.0) + output / 2

    def _rate(self) -> float | None:
        return known(self.demand.forecast.requests_per_second)

    def _fresh(self, role: Role) -> Iterable[EngineLoad]:
        for instance in self.fleet.serving(role):
            if instance.load is not None and self._is_fresh(instance.load):
                yield instance.load

    def _is_fresh(self, load: EngineLoad) -> bool:
        age = known(load.age_seconds)
        return age is not None and age <= self.settings.stale_after_seconds

    def _complete(self, role: Role) -> bool:
        loads = list(self._fresh(role))
        if not self.demand.forecast.complete or self._rate() is None or len(loads) < len(self.fleet.serving(role)):
            return False
        if self._rate() and (self._own_prefill_seconds() is None or not known(self.demand.forecast.output_tokens)):
            return False
        if role is Role.DECODE:
            return all(load.running_requests is not None and load.kv_used_tokens is not None for load in loads)
        return all(load.queued_uncached_tokens is not None and not blocked(load) for load in loads)

    def _believed(self, role: Role, measurement: Measurement | None) -> float | None:
        if measurement is None:
            return None
        return measurement.believed(
            changed_age_seconds=self.demand.changed_age_seconds(role),
            stale_after_seconds=self.settings.stale_after_seconds,
            least_samples=self.settings.least_samples,
        )

    def _sum(self, role: Role, *measurements: Measurement | None) -> float | None:
        """Sum of what is known: of percentiles, so rather too high than too low."""
        seconds = [value for value in (self._believed(role, each) for each in measurements) if value is not None]
        return sum(seconds) if seconds else None

    def _term(
        self,
        term: Term,
        role: Role,
        count: int,
        objective: float,
        predicted: float | None,
        measured: float | None,
        floor_seconds: float,
    ) -> TermLoad:
        floor = min(floor_seconds / objective, _MOST_LOAD)
        there = None
        if measured is not None:
            # What exceeds the floor is shared by more instances, or by fewer.
            base, serving = min(measured, floor_seconds), max(1, len(self.fleet.serving(role)))
            there = min((base + (measured - base) * serving / count) / objective, _MOST_LOAD)
        foreseen = None if predicted is None else min(predicted / objective, _MOST_LOAD)
        limit = max(1.0, floor * self.settings.unreachable_slack)
        return TermLoad(term, Load.of(predicted=foreseen, measured=there), floor, limit)


def _total(values: Iterable[int | None]) -> int:
    return sum(value for value in values if value is not None and value >= 0)
