"""What makes the load of a role: its terms for any count of instances, by the timing model and by what was measured.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from kllm_core.fleet import EngineLoad
from kllm_core.objectives import Load, Objectives, Role
from kllm_core.timing import DecodeTiming, EngineTiming
from kllm_operator.plan.believed import Believed
from kllm_operator.plan.congestion import blocked, full
from kllm_operator.plan.demand import Demand, known
from kllm_operator.plan.queueing import batch_after, decode_batch, waiting_after, waiting_seconds, with_spread
from kllm_operator.plan.role_load import Term, TermLoad
from kllm_operator.plan.seen import Seen
from kllm_operator.plan.settings import LoadSettings

_CHANCE = 2.0
"""Variation of work where nothing is known: that of chance, of arrivals and of lengths."""
_MOST_LOAD = 1000.0
"""Loads are cut here, so that an overload stays a number and orders with others."""


@dataclass(frozen=True)
class Terms:
    """Terms of both roles' loads under one demand.

    Attributes:
        seen: the fleet.
        ahead_seconds: until capacity that is asked for now serves.
        one_pool: instances of decode compute prompts, too.
    """

    objectives: Objectives
    seen: Seen
    demand: Demand
    timing: EngineTiming
    settings: LoadSettings
    ahead_seconds: float
    one_pool: bool = False

    @property
    def _believed(self) -> Believed:
        return Believed(self.demand, self.settings)

    @property
    def _prefills(self) -> Role:
        """The role that computes prompts."""
        return Role.DECODE if self.one_pool else Role.PREFILL

    def prefill(self, count: int, *, present: bool, lasting: bool) -> TermLoad:
        """Queue and prefill with `count` instances.

        Args:
            count: of instances.
            present: with what is queued there by now, and not with what is left of it.
            lasting: in the long run, and not when capacity that is asked for now serves.
        """
        role = self._prefills
        stages = self.demand.stages
        measured = self._believed.whole(role, stages.prefilled, stages.queue, stages.prefill)
        if measured is not None:
            measured = max(0.0, measured - (self._believed.of(role, stages.blocked) or 0.0))
        predicted = self._prefill_seconds(count, present=present, lasting=lasting)
        # No count of instances computes a prompt faster.
        own = max(self._long_prefill_seconds() or 0.0, self._believed.of(role, stages.prefill) or 0.0)
        objective = self.objectives.ttft_seconds * self._prefill_share()
        return self._term(Term.QUEUE_AND_PREFILL, role, count, objective, predicted, measured, own)

    def _prefill_share(self) -> float:
        """Part of the TTFT objective for queue and prefill: more, where the way to decode is measured and short."""
        if self.one_pool:
            return 1.0
        # What waits for room on decode ends when decode has more.
        stages = self.demand.stages
        way = self._believed.whole(Role.DECODE, stages.handover, stages.bind, stages.transfer, stages.first_step)
        if way is None:
            return self.settings.prefill_share
        left = 1 - way / self.objectives.ttft_seconds
        return min(max(left, self.settings.prefill_share), self.settings.most_prefill_share)

    def _prefill_seconds(self, count: int, *, present: bool, lasting: bool) -> float | None:
        rate, long = self._rate(), self._long_prefill_seconds()
        queued = [load.queued_uncached_tokens for load in self.seen.fresh[self._prefills] if not blocked(load)]
        tokens = math.ceil(_total(queued) / count)
        drain = self.timing.prefill.drain_seconds(tokens, chunk_tokens=self.settings.chunk_tokens)
        forecast, horizon = self.demand.forecast, self.settings.horizon_seconds
        prompt = known(forecast.uncached_tokens)
        if rate is None or long is None or not prompt or rate == tokens == 0:
            return drain + (long or 0.0) if tokens or rate == 0 else None
        mean = self._service_seconds()
        queue, ahead = drain, self.ahead_seconds
        variation = (known(forecast.work_variation) or _CHANCE) / 2
        if not present:
            # What is left of the queue when new capacity serves, which helps nobody who is gone by then.
            drain = max(0.0, drain - (1 - rate * mean / count) * ahead) if drain else 0.0
        waits, waits_long = waiting_seconds(
            requests_per_second=rate,
            service_seconds=mean,
            servers=count,
            percentile=self.objectives.percentile,
            saturation=self.settings.saturation,
            horizon_seconds=horizon,
            variation=variation,
        )
        if not lasting:
            most = queue + waiting_after(
                ahead,
                requests_per_second=rate,
                service_seconds=mean,
                servers=count,
                percentile=self.objectives.percentile,
                variation=variation,
            )
            waits, waits_long = min(waits, most), min(waits_long, most)
        # Long waits and long prompts seldom meet: their excesses over the means add up as those of independent times.
        excess = math.hypot(max(0.0, waits_long - waits), max(0.0, long - mean))
        return max(waits + mean + excess, drain + long)  # two views of one queue

    def _service_seconds(self) -> float:
        """Mean prefill; attention makes long prompts weigh more than the mean prompt shows."""
        forecast, timing = self.demand.forecast, self.timing.prefill
        new, cached = known(forecast.uncached_tokens) or 0.0, known(forecast.cached_tokens) or 0.0
        seconds = timing.seconds(math.ceil(new), math.ceil(cached))
        return seconds + timing.k * (new * new + 2 * new * cached) * (known(forecast.prompt_variation) or 0.0)

    def _long_prefill_seconds(self) -> float | None:
        """Prefill of the objective's percentile of prompts, log-normal if nothing better is known of them."""
        forecast = self.demand.forecast
        mean, long = known(forecast.uncached_tokens), known(forecast.long_uncached_tokens)
        if mean is None:
            return None
        if long is None and (variation := known(forecast.prompt_variation)):
            spread = math.sqrt(math.log1p(variation))
            distance = NormalDist().inv_cdf(self.objectives.percentile / 100)
            long = mean * math.exp(distance * spread - spread * spread / 2)
        cached = known(forecast.cached_tokens) or 0.0
        return self.timing.prefill.seconds(math.ceil(max(mean, long or 0.0)), math.ceil(cached))

    def _decoding(self, count: int) -> DecodeTiming:
        """Steps of decode, as long as they last with the prompts that are computed between them."""
        timing = self.timing.decode
        if not self.one_pool:
            return timing
        left = 1 - min((self._rate() or 0.0) * self._service_seconds() / count, self.settings.saturation)
        return DecodeTiming(timing.a / left, timing.b / left, timing.c / left)

    def decode(self, count: int, *, lasting: bool) -> tuple[TermLoad, ...]:
        """The terms of decode with `count` instances, in the long run or when capacity that is asked for now serves."""
        loads = self.seen.fresh[Role.DECODE]
        running = _total(load.running_requests for load in loads) if loads else None
        used = _total(load.kv_used_tokens for load in loads) if loads else None
        batch = self._forecast_batch(count, None if lasting else running)
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
            seconds.append(self._tpot_seconds(running / count, used / count, self._decoding(count)))
        if batch is not None:
            seconds.append(self._tpot_seconds(batch, batch * context, self._decoding(count)))
        floor = self._tpot_seconds(1, context, self.timing.decode)
        measured = self._believed.of(Role.DECODE, self.demand.stages.tpot)
        return self._term(Term.TPOT, Role.DECODE, count, objective, max(seconds, default=None), measured, floor)

    def _handover(self, count: int, running: int | None) -> TermLoad:
        objective = self.objectives.ttft_seconds * (1 - self.settings.prefill_share)
        stages = self.demand.stages
        # What the way itself takes; only waiting for room, on either side, shrinks with more instances.
        way = self._believed.whole(Role.DECODE, stages.handover, stages.bind, stages.transfer, stages.first_step)
        waits = self._believed.total(Role.DECODE, stages.blocked, stages.admission)
        measured = None if way is None and waits is None else (way or 0.0) + (waits or 0.0)
        predicted = self._room_seconds(count, running)
        return self._term(Term.HANDOVER, Role.DECODE, count, objective, predicted, measured, way or 0.0)

    def _room_seconds(self, count: int, running: int | None) -> float | None:
        """Until what waits for room on decode has got it, at the rate at which requests end."""
        output = known(self.demand.forecast.output_tokens)
        parked = [load for load in self.seen.fresh[self._prefills] if blocked(load)]
        held = _total(load.parked_requests for load in parked) + _total(load.queued_requests for load in parked)
        held += _total(load.queued_requests for load in self.seen.fresh[Role.DECODE] if full(load))
        serving = self.seen.serving[Role.DECODE]
        if not held or not running or not output or not serving:
            return None
        used = _total(load.kv_used_tokens for load in self.seen.fresh[Role.DECODE])
        tpot = self._tpot_seconds(running / serving, used / serving, self._decoding(serving))
        ends_per_second = running / serving / (output * tpot)
        return held / (ends_per_second * count)

    def _kv(self, count: int, loads: Sequence[EngineLoad], used: int | None, forecast: float | None) -> TermLoad:
        waters = [load.kv_high_water_tokens for load in loads if load.kv_high_water_tokens]
        tokens = [value for value in (None if used is None else used / count, forecast) if value is not None]
        predicted = max(tokens) if waters and tokens else None
        return self._term(Term.KV, Role.DECODE, count, float(min(waters, default=1)), predicted, None, 0.0)

    def _forecast_batch(self, count: int, running: int | None) -> float | None:
        """Of one instance: in the time ahead if it is known what runs, else in the steady state."""
        rate, output, context = self._rate(), known(self.demand.forecast.output_tokens), self._context_tokens()
        if rate == 0 and running is None:
            return 0.0
        if rate is None or not output or context is None:
            return None
        asked = {
            "requests_per_second": rate,
            "output_tokens": output,
            "context_tokens": context,
            "accept_length": self._accept_length(),
        }
        percentile, horizon = self.objectives.percentile, self.settings.horizon_seconds
        if running is not None:
            batch = batch_after(
                self._decoding(count), running / count, seconds=self.ahead_seconds, servers=count, **asked
            )
            return with_spread(batch, servers=count, percentile=percentile)
        return decode_batch(
            self._decoding(count),
            servers=count,
            percentile=percentile,
            saturation=self.settings.saturation,
            horizon_seconds=horizon,
            **asked,
        )

    def _tpot_seconds(self, batch: float, kv_tokens: float, timing: DecodeTiming) -> float:
        return timing.tpot_seconds(math.ceil(batch), math.ceil(kv_tokens), accept_length=self._accept_length())

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

    def complete(self, role: Role) -> bool:
        """Whether nothing that could raise the role's load is silent."""
        loads = self.seen.fresh[role]
        if not self.demand.forecast.complete or self._rate() is None or len(loads) < self.seen.serving[role]:
            return False
        if self._rate() and (
            known(self.demand.forecast.uncached_tokens) is None or not known(self.demand.forecast.output_tokens)
        ):
            return False
        steps = role is Role.PREFILL or all(
            load.running_requests is not None and load.kv_used_tokens is not None for load in loads
        )
        if role is not self._prefills:
            return steps
        return steps and all(load.queued_uncached_tokens is not None and not blocked(load) for load in loads)

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
            base, serving = min(measured, floor_seconds), max(1, self.seen.serving[role])
            there = min((base + (measured - base) * serving / count) / objective, _MOST_LOAD)
        foreseen = None if predicted is None else min(predicted / objective, _MOST_LOAD)
        limit = max(1.0, floor * self.settings.unreachable_slack)
        return TermLoad(term, Load.of(predicted=foreseen, measured=there), floor, limit)


def _total(values: Iterable[int | None]) -> int:
    return sum(value for value in values if value is not None and value >= 0)
