"""Pauses between attempts that may fail for long."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff(rng: random.Random, *, first_seconds: float = 0.05, most_seconds: float = 2.0) -> Iterator[float]:
    """Pauses that double up to a bound; each is drawn between half of it and all of it."""
    pause = first_seconds
    while True:
        yield pause * rng.uniform(0.5, 1.0)
        pause = min(pause * 2, most_seconds)
