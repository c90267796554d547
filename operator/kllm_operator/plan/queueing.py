"""Steady states of the two roles: waiting for prefill, and the batch on decode. Pure.

Both are finite above saturation, too, since an infinite load would count as unknown: what exceeds `saturation` grows
linearly over a horizon. Both fall, or stay, with each further instance.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from kllm_core.timing import DecodeTiming

_PARTS = 8
"""That the time ahead is taken in; the batch of twice as many differs by a few percent."""


def waiting_seconds(
    *,
    requests_per_second: float,
    service_seconds: float,
    servers: int,
    percentile: int,
    saturation: float,
    horizon_seconds: float,
    variation: float = 1.0,
) -> tuple[float, float]:
    """Mean and percentile of the time in a queue before `servers` equal ones.

    Sakasegawa's approximation: a request waits with probability u^(√(2(n+1)) - 1), and then exponentially long with
    mean variation·service/(n·(1 - u)), where u is the utilisation, and variation the mean of the squared coefficients
    of variation of gaps and services (Allen and Cunneen); 1 where both are exponential.
    """
    utilisation = requests_per_second * service_seconds / servers
    within = min(utilisation, saturation)
    if within <= 0:
        return 0.0, 0.0
    waits = (math.sqrt(2 * (servers + 1)) - 1) * math.log(within)
    mean = variation * service_seconds / (servers * (1 - within))
    tail = mean * max(0.0, waits - math.log(1 - percentile / 100))
    grown = (utilisation - within) * horizon_seconds
    return mean * math.exp(waits) + grown, tail + grown


def waiting_after(
    seconds: float,
    *,
    requests_per_second: float,
    service_seconds: float,
    servers: int,
    percentile: int,
    variation: float = 1.0,
) -> float:
    """Percentile of what a queue that is empty by now can have grown to, in seconds of waiting.

    The work that arrives in a time is about normally distributed, with the mean utilisation · time and, per server, the
    variance 2 · variation · rate · service² · time / servers² (Brownian approximation, Kingman). A queue near
    saturation is long only after a long time; with less work it is longest after a shorter one.
    """
    spare = 1 - requests_per_second * service_seconds / servers
    spread = math.sqrt(2 * variation * requests_per_second) * service_seconds / servers
    spread *= max(0.0, NormalDist().inv_cdf(percentile / 100))
    longest = min(seconds, (spread / (2 * spare)) ** 2) if spare > 0 else seconds
    return max(0.0, spread * math.sqrt(longest) - spare * longest)


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
    the number of steps asked for per second. The spread around it is Poisson's, of all instances together: requests go
    to the one with the smallest batch.
    """
    steps = requests_per_second * output_tokens / (servers * accept_length)
    per_sequence = timing.b + timing.c * context_tokens
    within = min(steps, saturation / per_sequence) if per_sequence > 0 else steps
    batch = within * timing.a / (1 - within * per_sequence)
    if steps > within:
        batch += (steps - within) * accept_length / output_tokens * horizon_seconds
    return with_spread(batch, servers=servers, percentile=percentile)


def batch_after(
    timing: DecodeTiming,
    batch: float,
    *,
    seconds: float,
    requests_per_second: float,
    output_tokens: float,
    context_tokens: float,
    accept_length: float,
    servers: int,
) -> float:
    """Mean batch on one of `servers` equal instances so many seconds from now, without its spread.

    Answers last: a batch grows by what arrives and shrinks by what ends, batch · accept / (output · step) per second,
    and so reaches its steady state only in the time of an answer.
    """
    part = seconds / _PARTS
    per_sequence = timing.b + timing.c * context_tokens
    for _ in range(_PARTS):
        # The rate of ends is taken at the end of each part, so that no length of it makes the batch swing.
        ends = accept_length / (output_tokens * (timing.a + per_sequence * batch) or math.inf)
        batch = (batch + part * requests_per_second / servers) / (1 + part * ends)
    return batch


def with_spread(batch: float, *, servers: int, percentile: int) -> float:
    """The percentile of a batch whose mean is known."""
    return batch + max(0.0, NormalDist().inv_cdf(percentile / 100)) * math.sqrt(batch / servers)
