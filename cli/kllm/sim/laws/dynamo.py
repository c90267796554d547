"""Dynamo's SLA planner: counts from predicted traffic and what an engine carries, and one more or fewer by load. Pure.

Source: ai-dynamo/dynamo, components/src/dynamo/planner (core/throughput_scaling.py, load_scaling.py, budget.py) and its
"Planner Design" page:
throughput, each 180 s: replicas = ceil(predicted requests/s / requests/s of an engine within the objectives), where
prefill counts uncached tokens. Up to version 0.9 correction factors c = measured / expected latency bent that: prefill
load · min(1, c), decode with a TPOT limit of objective / c; later versions fit the engine model instead, so that the
factor is off unless asked for.
load, each 5 s: +1 if all engines estimate more than the objective; -1 if with N/(N-1) of its load each stays under 0.8
of it; nothing while the count is not reached. With both, throughput is the lower bound. Over the budget both pools
shrink in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kllm.sim.laws.base import Counts, EngineView, Observation, Pool, PoolView, Setup
from kllm.sim.laws.engine_rates import decode_rate, prefill_rate, whole_rate, whole_tpot
from kllm.sim.laws.predictors import Kind, Predictor

_MOST_CACHED = 0.95


@dataclass(frozen=True)
class DynamoSettings:
    """Knobs of the planner, with its defaults. Seconds."""

    predictor: Kind = Kind.KALMAN
    throughput: bool = True
    load: bool = False
    correction: bool = False
    throughput_interval: float = 180.0
    load_interval: float = 5.0
    sensitivity: float = 0.8
    """Part of the objective under which the rest must stay for one fewer."""
    ttft_share: float = 1.0
    """Part of the TTFT objective that the planner is given; below 1 it keeps a reserve."""
    tpot_share: float = 1.0

    def __post_init__(self) -> None:
        if not (self.throughput or self.load):
            raise ValueError("throughput and load are both off: nothing would ever scale")
        if min(self.throughput_interval, self.load_interval) <= 0:
            raise ValueError("intervals must be above 0 s")


class Dynamo:
    """The planner."""

    def __init__(self, setup: Setup, settings: DynamoSettings) -> None:
        self.interval_seconds = settings.load_interval if settings.load else settings.throughput_interval
        self.window_seconds = settings.throughput_interval if settings.throughput else settings.load_interval
        self._setup, self._settings = setup, settings
        self._ttft = setup.objectives.ttft_seconds * settings.ttft_share
        self._tpot = setup.objectives.tpot_seconds * settings.tpot_share
        self._rate, self._input, self._output = (Predictor(settings.predictor) for _ in range(3))
        self._floor = {pool: bounds.least for pool, bounds in setup.bounds.items()}
        self._next_throughput = settings.throughput_interval

    def decide(self, observation: Observation) -> Counts:
        """Predict when it is time; react to load if that is on."""
        counts = {pool: self._setup.bounds[pool].clamp(observation.pools[pool].desired) for pool in self._setup.bounds}
        reason = "Hold"
        if self._settings.throughput and observation.time >= self._next_throughput:
            self._next_throughput = observation.time + self._settings.throughput_interval
            reason = self._predict(observation) or reason
            if reason == "Throughput" and not self._settings.load:
                counts = dict(self._floor)
        if self._settings.load:
            steps = {pool: self._step(observation, pool) for pool in counts}
            counts = {pool: max(count + steps[pool], self._floor[pool]) for pool, count in counts.items()}
            reason = "Load" if any(steps.values()) else reason
        return Counts(self._budgeted(self._setup.clamped(counts)), reason, f"at least {dict(self._floor)}")

    def _predict(self, observation: Observation) -> str | None:
        """Set the counts that the predicted traffic needs; None without any traffic yet."""
        self._rate.add(observation.requests_per_second)
        if observation.input_tokens is not None:
            self._input.add(observation.input_tokens)
        if observation.output_tokens is not None:
            self._output.add(observation.output_tokens)
        rate, tokens, output = self._rate.next(), self._input.next(), self._output.next()
        if tokens <= 0 or output <= 0:
            return None
        uncached = tokens * (1 - min(observation.cached_share, _MOST_CACHED))
        if Pool.ONE in self._setup.bounds:
            engine = whole_rate(self._setup, input_tokens=uncached, output_tokens=output, tpot_seconds=self._tpot)
            self._floor[Pool.ONE] = self._needed(rate, engine, Pool.ONE)
            return "Throughput"
        prefill_factor, decode_factor = self._factors(observation, uncached, tokens, output)
        engine = prefill_rate(self._setup, uncached)
        self._floor[Pool.PREFILL] = self._needed(rate * min(1.0, prefill_factor), engine, Pool.PREFILL)
        engine = decode_rate(
            self._setup, input_tokens=tokens, output_tokens=output, tpot_seconds=self._tpot / decode_factor
        )
        self._floor[Pool.DECODE] = self._needed(rate, engine, Pool.DECODE)
        return "Throughput"

    def _needed(self, rate: float, engine_rate: float, pool: Pool) -> int:
        bounds = self._setup.bounds[pool]
        return bounds.clamp(math.ceil(rate / engine_rate - 1e-9)) if engine_rate > 0 else bounds.most

    def _factors(self, observation: Observation, uncached: float, tokens: float, output: float) -> tuple[float, float]:
        """Measured over expected latency of prefill and of decode; 1 where either is unknown."""
        if not self._settings.correction:
            return 1.0, 1.0
        own = self._setup.timing.prefill.seconds(max(1, round(uncached)))
        prefill = observation.ttft.mean / own if observation.ttft and own > 0 else 1.0
        view = observation.pools[Pool.DECODE]
        running = sum(engine.running_requests for engine in view.engines)
        if not observation.tpot or not observation.tpot.mean or not running:
            return prefill, 1.0
        batch = math.ceil(running / view.serving)
        expected = self._setup.timing.decode.seconds(batch, round(batch * (tokens + output / 2)))
        return prefill, observation.tpot.mean / expected if expected > 0 else 1.0

    def _step(self, observation: Observation, pool: Pool) -> int:
        """One more, one fewer or none by load; none while a change is under way."""
        view = observation.pools[pool]
        if not view.engines or view.starting or view.serving != view.desired:
            return 0
        if all(self._over(observation, view, pool, engine) for engine in view.engines):
            return 1
        if view.serving > 1 and all(self._spare(observation, view, pool, engine) for engine in view.engines):
            return -1
        return 0

    def _over(self, observation: Observation, view: PoolView, pool: Pool, engine: EngineView) -> bool:
        ttft, tpot = self._estimated(observation, view, pool, engine, 1.0)
        return sum(ttft) > self._ttft or tpot > self._tpot

    def _spare(self, observation: Observation, view: PoolView, pool: Pool, engine: EngineView) -> bool:
        """Whether one engine with its part of a leaving one's load would have room."""
        factor = view.serving / (view.serving - 1)
        (queue, own), tpot = self._estimated(observation, view, pool, engine, factor)
        sensitivity = self._settings.sensitivity
        if pool is not Pool.DECODE and not queue < max(0.0, self._ttft - own) * sensitivity:
            return False
        total = engine.kv_total_tokens or self._setup.kv_total_tokens
        fits = pool is Pool.PREFILL or engine.kv_used_tokens * factor < total
        return fits and tpot < self._tpot * sensitivity

    def _estimated(
        self, observation: Observation, view: PoolView, pool: Pool, engine: EngineView, factor: float
    ) -> tuple[tuple[float, float], float]:
        """(Seconds in the queue, own prefill), and TPOT, with `factor` times the load; 0 what the pool does not do."""
        tokens = (observation.input_tokens or 0.0) * (1 - min(observation.cached_share, _MOST_CACHED))
        own = self._setup.timing.prefill.seconds(round(tokens)) if pool is not Pool.DECODE else 0.0
        queue = 0.0
        if pool is not Pool.DECODE:
            queued = (engine.queued_tokens + view.waiting_tokens / view.serving) * factor
            queue = self._setup.timing.prefill.drain_seconds(round(queued), chunk_tokens=self._setup.chunk_tokens)
        if pool is Pool.PREFILL:
            return (queue, own), 0.0
        share = observation.requests_per_second / view.serving * own * factor if pool is Pool.ONE else 0.0
        queued_kv = engine.queued_requests * (observation.input_tokens or 0.0) if pool is Pool.DECODE else 0.0
        tpot = whole_tpot(
            self._setup,
            batch=(engine.running_requests + (engine.queued_requests if pool is Pool.DECODE else 0)) * factor,
            kv_tokens=(engine.kv_used_tokens + queued_kv) * factor,
            prefill_share=share,
        )
        return (queue, own), tpot

    def _budgeted(self, counts: dict[Pool, int]) -> dict[Pool, int]:
        """Counts within the budget: what is above the floors shrinks in proportion."""
        budget, bounds = self._setup.gpu_budget, self._setup.bounds
        asked = sum(count * bounds[pool].gpus for pool, count in counts.items())
        if budget is None or asked <= budget:
            return counts
        least = sum(each.least * each.gpus for each in bounds.values())
        share = max(0.0, budget - least) / (asked - least) if asked > least else 0.0
        return {
            pool: bounds[pool].least + math.floor((count - bounds[pool].least) * share + 1e-9)
            for pool, count in counts.items()
        }
