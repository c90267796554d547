"""Steady states of the two roles: waiting for prefill, and the batch on decode. Pure.

Both are finite above saturation, too, since an infinite load would count as unknown: what exceeds `saturation` grows
linearly over a horizon. Both fall, or stay, with each further instance.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from kllm_core.timing import DecodeTiming


def waiting_seconds(
    *,
    requests_per_second: float,
    service_seconds: float,
    servers: int,
    percentile: int,
    saturation: float,
    horizon_seconds: float,
) -> float:
    """Percentile of the time in a queue before `servers` equal ones.

    Sakasegawa's approximation: a request waits with probability u^(√(2(n+1)) - 1), and then exponentially long with
    mean service/(n·(1 - u)), where u is the utilisation.
    """
    utilisation = requests_per_second * service_seconds / servers
    within = min(utilisation, saturation)
    if within <= 0:
        return 0.0
    waits = (math.sqrt(2 * (servers + 1)) - 1) * math.log(within)
    mean = service_seconds / (servers * (1 - within))
    tail = mean * max(0.0, waits - math.log(1 - percentile / 100))
    return tail + (utilisation - within) * horizon_seconds


def decode_batch(
    timing: DecodeTiming,
    *,
    requests_per_second: float,
    output_tokens: float,
    context_tokens: float,
    accept_length: float,
    servers: int,
    percentile: int,
    saturation: float,
    horizon_seconds: float,
) -> float:
    """Percentile of the sequences that decode together on one of `servers` equal instances.

    By Little's law batch = rate · output · step/accept, with step = a + g·batch; so batch = x·a/(1 - x·g), where x is
    the number of steps asked for per second. The spread around it is Poisson's.
    """
    steps = requests_per_second * output_tokens / (servers * accept_length)
    per_sequence = timing.b + timing.c * context_tokens
    within = min(steps, saturation / per_sequence) if per_sequence > 0 else steps
    batch = within * timing.a / (1 - within * per_sequence)
    if steps > within:
        batch += (steps - within) * accept_length / output_tokens * horizon_seconds
    spread = max(0.0, NormalDist().inv_cdf(percentile / 100))
    return batch + spread * math.sqrt(batch)
