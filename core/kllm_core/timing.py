"""How long an engine step takes. Pure.

The prefill form follows from the work of causal attention: n new tokens, each attending to the c cached ones and, on
average, half of the new ones, cost a linear part for the layers' matrices and a part proportional to n·(n + 2c) for
attention. The decode form is the memory traffic of one step: weights once (a), activations per sequence (b), KV read
(c).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillTiming:
    """Seconds of one prefill step: a + Σ (b·n + k·n·(n + 2c)) over the requests of the batch.

    Attributes:
        a: seconds per step.
        b: seconds per new token.
        k: seconds per pair of tokens that attend to each other (twice counted).
    """

    a: float
    b: float
    k: float

    def __post_init__(self) -> None:
        _check_coefficients(a=self.a, b=self.b, k=self.k)

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Time of a step with one request: `new_tokens` computed on top of `cached_tokens`."""
        return self.batch_seconds([(new_tokens, cached_tokens)])

    def batch_seconds(self, requests: Iterable[tuple[int, int]]) -> float:
        """Time of one step over (new tokens, cached tokens) pairs; 0 when there is nothing to compute."""
        total, computed = self.a, False
        for new_tokens, cached_tokens in requests:
            if new_tokens < 0 or cached_tokens < 0:
                raise ValueError(f"token counts must not be negative, got {new_tokens}, {cached_tokens}")
            computed = computed or new_tokens > 0
            total += self.b * new_tokens + self.k * new_tokens * (new_tokens + 2 * cached_tokens)
        return total if computed else 0.0

    def drain_seconds(self, tokens: int, *, chunk_tokens: int) -> float:
        """Time to compute a queue of `tokens` without cached prefixes, in steps of `chunk_tokens`."""
        if chunk_tokens <= 0:
            raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
        if tokens <= 0:
            return 0.0
        steps = math.ceil(tokens / chunk_tokens)
        # Attention inside a chunk only: what is queued is many short requests far more often than one long one.
        return steps * self.a + tokens * (self.b + self.k * min(tokens, chunk_tokens))


@dataclass(frozen=True)
class DecodeTiming:
    """Seconds of one decode step: a + b·batch + c·KV tokens.

    Attributes:
        a: seconds per step.
        b: seconds per sequence in the batch.
        c: seconds per KV token read by the whole batch.
    """

    a: float
    b: float
    c: float

    def __post_init__(self) -> None:
        _check_coefficients(a=self.a, b=self.b, c=self.c)

    def seconds(self, batch: int, kv_tokens: int) -> float:
        """Time of one step; 0 for an empty batch."""
        if batch < 0 or kv_tokens < 0:
            raise ValueError(f"batch and KV tokens must not be negative, got {batch}, {kv_tokens}")
        return self.a + self.b * batch + self.c * kv_tokens if batch else 0.0

    def tpot_seconds(self, batch: int, kv_tokens: int, *, accept_length: float = 1.0) -> float:
        """Time per output token when each step yields `accept_length` tokens per sequence."""
        if accept_length < 1.0:
            raise ValueError(f"accept_length must be at least 1, got {accept_length}")
        return self.seconds(batch, kv_tokens) / accept_length


@dataclass(frozen=True)
class EngineTiming:
    """Both roles of one engine type, as the planner, the router and the simulator use them."""

    prefill: PrefillTiming
    decode: DecodeTiming


def parse_timing(text: str) -> EngineTiming:
    """Read the timing out of an engine's file, whose other parts are not looked at.

    Args:
        text: JSON: `{"prefill": {"a": 0.01, "b": 1e-4, "k": 1e-9}, "decode": {"a": 0.01, "b": 2e-4, "c": 1e-8}}`.

    Raises:
        ValueError: a coefficient is missing, or is no finite number of at least 0.
    """
    try:
        document = json.loads(text)
        prefill = [float(document["prefill"][name]) for name in ("a", "b", "k")]
        decode = [float(document["decode"][name]) for name in ("a", "b", "c")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it must be JSON with prefill {{a, b, k}} and decode {{a, b, c}}: {error!r}") from error
    return EngineTiming(PrefillTiming(*prefill), DecodeTiming(*decode))


def _check_coefficients(**coefficients: float) -> None:
    for name, value in coefficients.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of seconds, not negative, got {value!r}")


PRIOR = EngineTiming(PrefillTiming(a=0.01, b=1e-4, k=1e-9), DecodeTiming(a=0.01, b=2e-4, c=1e-8))
"""What is assumed before anything was measured: the order of magnitude of an 8B model on one data-centre GPU."""
