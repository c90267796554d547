"""When requests arrive, in seconds from the beginning. Pure."""

from __future__ import annotations

import enum
import math

import numpy as np

_CHUNK = 256


class Arrivals(enum.StrEnum):
    """How arrivals are spread over time."""

    POISSON = "poisson"
    CONSTANT = "constant"


def arrivals(kind: Arrivals, *, rate: float, duration: float, rng: np.random.Generator) -> list[float]:
    """Arrivals in [0, duration), sorted.

    Args:
        kind: Poisson has exponential gaps; constant has equal ones and begins at 0.
        rate: requests per second.
        duration: seconds.
        rng: used by Poisson only.
    """
    if kind is Arrivals.CONSTANT:
        # The product's rounding error must not add an arrival at the very end.
        count = math.ceil(round(rate * duration, 9))
        return [at for at in (index / rate for index in range(count)) if at < duration]
    # Gaps are drawn in their order: another rate stretches the same arrivals, and a longer duration adds to them.
    times: list[float] = []
    begin = 0.0
    while begin < duration:
        chunk = begin + np.cumsum(rng.exponential(1.0, size=_CHUNK)) / rate
        times += chunk.tolist()
        begin = times[-1]
    return [at for at in times if at < duration]
