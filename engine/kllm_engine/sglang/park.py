"""Limits of parked KV: prefilled prompts that wait on a prefill instance for a decode instance. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParkLimits:
    """Bounds of parked KV.

    Attributes:
        tokens: most prompt tokens that are parked, or on their way to be.
        requests: most such requests; each holds a slot and a transfer buffer, and bound requests need some too.
        seconds: after which a parked prompt that no decode instance took is given up.
    """

    tokens: int
    requests: int
    seconds: float

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"the limit of parked tokens must be at least 1, got {self.tokens}")
        if self.requests < 1:
            raise ValueError(f"the limit of parked requests must be at least 1, got {self.requests}")
        if self.seconds <= 0:
            raise ValueError(f"the park timeout must be above 0 seconds, got {self.seconds:g}")


@dataclass(frozen=True)
class Committed:
    """Requests that are parked, or admitted and still without a decode instance."""

    requests: int
    tokens: int


def admissible(queued_tokens: Sequence[int], *, committed: Committed, limits: ParkLimits) -> int:
    """How many requests, from the head of the queue, may be prefilled without a decode instance.

    In order of arrival, so that short prompts do not starve a long one. When nothing is committed the first one may go
    whatever its length: a prompt above the limit would else never be served.

    Args:
        queued_tokens: prompt lengths in order of arrival.
        committed: what is parked or on its way to be.
        limits: the bounds.
    """
    total = committed.tokens
    for position, tokens in enumerate(queued_tokens):
        requests = committed.requests + position
        if requests > 0 and (total + tokens > limits.tokens or requests >= limits.requests):
            return position
        total += tokens
    return len(queued_tokens)


def overdue(parked_since: Mapping[str, float], *, now: float, limits: ParkLimits) -> list[str]:
    """Requests whose KV has waited too long, the longest first."""
    late = [rid for rid, since in parked_since.items() if now - since >= limits.seconds]
    return sorted(late, key=lambda rid: parked_since[rid])
