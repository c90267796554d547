"""TTFT and TPOT that the next request would see, as a latency predictor in a router tells them. Pure.

llm-d's predictor learns both from samples with the engine's queue, running requests and KV use as features. Here the
engine's timing takes the place of the trained model: the predictor at its best. Where it is not trained yet, it cannot
tell more than it has seen (a tree ensemble's answer is a mean of labels), which the law that uses it applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from kllm.sim.laws.base import EngineView, Observation, Pool, PoolView, Setup
from kllm.sim.laws.engine_rates import whole_tpot

_OUTPUT_TOKENS = 256.0
"""Assumed while no request has finished."""


@dataclass(frozen=True)
class Predicted:
    """Seconds for the next request; None where the pool does not decide it."""

    ttft: float | None
    tpot: float | None


def predicted(setup: Setup, observation: Observation, pool: Pool) -> Predicted:
    """What the next request would see on the engine with the least queued tokens, the router's choice.

    What the router itself still holds goes before it, spread over the engines.
    """
    view = observation.pools[pool]
    if not view.engines or observation.input_tokens is None:
        return Predicted(None, None)
    engine = min(view.engines, key=lambda each: (each.queued_tokens, each.requests))
    uncached = observation.input_tokens * (1 - observation.cached_share)
    own = setup.timing.prefill.seconds(max(1, round(uncached)))
    drain = setup.timing.prefill.drain_seconds(
        engine.queued_tokens + view.waiting_tokens // view.serving, chunk_tokens=setup.chunk_tokens
    )
    if pool is Pool.PREFILL:
        return Predicted(drain + own, None)
    share = 0.0
    if pool is Pool.ONE:
        share = observation.requests_per_second / view.serving * own
    tpot = whole_tpot(
        setup,
        batch=engine.running_requests + 1,
        kv_tokens=engine.kv_used_tokens + observation.input_tokens,
        prefill_share=share,
    )
    room = _room_seconds(setup, observation, view, engine, tpot)
    return Predicted(max(drain, room) + own if pool is Pool.ONE else None, tpot)


def _room_seconds(
    setup: Setup, observation: Observation, view: PoolView, engine: EngineView, tpot_seconds: float
) -> float:
    """Seconds until the KV pool has room: those before it wait for as many to finish."""
    total = engine.kv_total_tokens or setup.kv_total_tokens
    if engine.kv_used_tokens + (observation.input_tokens or 0.0) <= total or not engine.running_requests:
        return 0.0
    finishing = engine.running_requests / ((observation.output_tokens or _OUTPUT_TOKENS) * tpot_seconds)
    return (engine.queued_requests + view.waiting_requests / view.serving + 1) / finishing
