"""What one engine can carry within the objectives, from its timing: what laws with a performance model know. Pure."""

from __future__ import annotations

import math

from kllm.sim.laws.base import Setup

_MOST_PREFILL_SHARE = 0.95
_STEPS = 40


def prefill_rate(setup: Setup, input_tokens: float) -> float:
    """Requests/s of one prefill engine: the batch within a step's tokens that computes most within the TTFT objective.

    A prompt that alone takes longer than the objective is computed alone.
    """
    tokens = max(1, round(input_tokens))
    batch, best = 1, 0.0
    while batch == 1 or batch * tokens <= setup.chunk_tokens:
        seconds = setup.timing.prefill.batch_seconds([(tokens, 0)] * batch)
        if batch > 1 and seconds > setup.objectives.ttft_seconds:
            break
        best = max(best, batch / seconds) if seconds > 0 else math.inf
        batch += max(1, batch // 16)
    return best


def decode_rate(setup: Setup, *, input_tokens: float, output_tokens: float, tpot_seconds: float) -> float:
    """Requests/s of one decode engine: max over batches b of b / (OSL · TPOT(b)), TPOT within `tpot_seconds`.

    A batch holds the KV of `input_tokens` and half of the output per request. If even one request breaks the limit, the
    rate is that of one.
    """
    context, output = input_tokens + output_tokens / 2, max(1.0, output_tokens)
    best, batch = 0.0, 1
    while batch == 1 or batch * context <= setup.kv_total_tokens:
        seconds = setup.timing.decode.seconds(batch, round(batch * context))
        if batch > 1 and seconds > tpot_seconds:
            break
        best = max(best, batch / (output * seconds)) if seconds > 0 else math.inf
        batch += max(1, batch // 16)
    return best


def whole_rate(setup: Setup, *, input_tokens: float, output_tokens: float, tpot_seconds: float) -> float:
    """Requests/s of one engine that does both, found by bisection; 0 if none fits.

    Prefill takes its share of the time from decode: TPOT = step / (1 - share), share = rate · prefill seconds.
    """
    own = setup.timing.prefill.seconds(max(1, round(input_tokens)))
    low, high = 0.0, _MOST_PREFILL_SHARE / own if own > 0 else 1e6
    for _ in range(_STEPS):
        rate = (low + high) / 2
        fits = _whole_fits(setup, rate, own, input_tokens, output_tokens, tpot_seconds)
        low, high = (rate, high) if fits else (low, rate)
    return low


def _whole_fits(
    setup: Setup, rate: float, own: float, input_tokens: float, output_tokens: float, tpot_seconds: float
) -> bool:
    share = rate * own
    if own / (1 - share) > setup.objectives.ttft_seconds:
        return False
    # Little's law at the limit itself: the batch is largest there.
    batch = rate * output_tokens * tpot_seconds
    kv = batch * (input_tokens + output_tokens / 2)
    if kv > setup.kv_total_tokens:
        return False
    return whole_tpot(setup, batch=batch, kv_tokens=kv, prefill_share=share) <= tpot_seconds


def whole_tpot(setup: Setup, *, batch: float, kv_tokens: float, prefill_share: float) -> float:
    """Seconds per output token of an engine that spends `prefill_share` of its time on prompts."""
    step = setup.timing.decode.seconds(math.ceil(batch), round(kv_tokens))
    return step / (1 - min(max(prefill_share, 0.0), _MOST_PREFILL_SHARE))
