"""Distributions of input and output lengths. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAX_TOKENS = 1_000_000
_FORMS = "use N, uniform:LOW-HIGH or lognormal:MEDIAN:SIGMA"


class Lengths(Protocol):
    """Token counts to draw from."""

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """As many lengths, each from 1 to MAX_TOKENS."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:  # noqa: ARG002 - it draws nothing
        """As many times the same."""
        return [self.tokens] * count


@dataclass(frozen=True)
class Uniform:
    """Every length from low to high, both included, is as likely."""

    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Draw."""
        return [int(value) for value in rng.integers(self.low, self.high, size=count, endpoint=True)]


@dataclass(frozen=True)
class LogNormal:
    """Half are below the median; sigma is the standard deviation of the logarithm."""

    median: float
    sigma: float

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Draw, and cut what lies outside of 1 to MAX_TOKENS."""
        # Cut the logarithm, since its exponential may be too large for a float.
        logarithms = np.clip(rng.normal(math.log(self.median), self.sigma, size=count), 0.0, math.log(MAX_TOKENS))
        return [int(value) for value in np.clip(np.rint(np.exp(logarithms)), 1, MAX_TOKENS)]


def parse_lengths(text: str) -> Lengths:
    """Read `512`, `uniform:100-900` or `lognormal:512:0.6`.

    Raises:
        ValueError: it is none of these; the text holds the fix.
    """
    kind, _, rest = text.strip().partition(":")
    try:
        if kind == "uniform":
            low, _, high = rest.partition("-")
            return _uniform(int(low), int(high))
        if kind == "lognormal":
            median, _, sigma = rest.partition(":")
            return _lognormal(float(median), float(sigma))
        if not rest:
            return _fixed(int(kind))
    except _RangeError:
        raise
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no distribution of lengths; {_FORMS}")


class _RangeError(ValueError):
    """The form is right and a number is not."""


def _fixed(tokens: int) -> Fixed:
    if not 1 <= tokens <= MAX_TOKENS:
        raise _RangeError(f"{tokens} tokens; use 1 to {MAX_TOKENS}")
    return Fixed(tokens)


def _uniform(low: int, high: int) -> Uniform:
    if not 1 <= low <= high <= MAX_TOKENS:
        raise _RangeError(f"uniform from {low} to {high}; use 1 <= LOW <= HIGH <= {MAX_TOKENS}")
    return Uniform(low, high)


def _lognormal(median: float, sigma: float) -> LogNormal:
    if not (1 <= median <= MAX_TOKENS and 0 <= sigma <= 5):
        raise _RangeError(f"lognormal with median {median} and sigma {sigma}; use 1 to {MAX_TOKENS}, and 0 to 5")
    return LogNormal(median, sigma)
