"""Fits the timing model to measured steps by least squares with coefficients that are not negative. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kllm_core.timing import DecodeTiming, PrefillTiming

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class FitError(ValueError):
    """The measurements do not tell all coefficients apart; the text says what is missing."""


@dataclass(frozen=True)
class PrefillPoint:
    """One measured prompt.

    Attributes:
        tokens: of the prompt, none of them cached.
        seconds: from sending to the first token.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True)
class DecodePoint:
    """One measured batch.

    Attributes:
        batch: answers that were generated together.
        kv_tokens: of all of them, in the middle of the measurement.
        seconds: of one decode step.
    """

    batch: int
    kv_tokens: int
    seconds: float


def fit_prefill(points: Sequence[PrefillPoint], *, chunk_tokens: int) -> PrefillTiming:
    """The prefill timing that is nearest to the points, each by its relative error.

    A prompt of n tokens takes ceil(n / chunk) steps, and all of them together k·n² of attention, whatever the chunk.

    Raises:
        FitError: fewer than three different lengths were measured.
    """
    if len({point.tokens for point in points}) < 3:
        raise FitError("prefill has three coefficients; measure prompts of at least three lengths")
    columns = np.array([[math.ceil(p.tokens / chunk_tokens), p.tokens, p.tokens**2] for p in points], dtype=np.float64)
    a, b, k = _nonnegative(columns, np.array([point.seconds for point in points]))
    return PrefillTiming(a, b, k)


def fit_decode(points: Sequence[DecodePoint]) -> DecodeTiming:
    """The decode timing that is nearest to the points, each by its relative error.

    Raises:
        FitError: batch and KV were never changed apart from each other.
    """
    columns = np.array([[1, point.batch, point.kv_tokens] for point in points], dtype=np.float64).reshape(-1, 3)
    # Lengths are never met exactly: what differs by less than a hundredth is the same.
    if len(points) < 3 or np.linalg.cond(columns / np.maximum(columns.max(axis=0), 1)) > 100:
        raise FitError("decode has three coefficients; measure at least two batches and two lengths of prompts")
    a, b, c = _nonnegative(columns, np.array([point.seconds for point in points]))
    return DecodeTiming(a, b, c)


def prefill_seconds(timing: PrefillTiming, tokens: int, *, chunk_tokens: int) -> float:
    """What the model says that a prompt takes, in chunks."""
    return timing.seconds(tokens) + (math.ceil(tokens / chunk_tokens) - 1) * timing.a


def _nonnegative(columns: Floats, seconds: Floats) -> tuple[float, float, float]:
    """Coefficients of the least sum of squared relative errors.

    The best non-negative solution is an unconstrained one of the columns that it uses, and of three columns there are
    seven choices: all are tried.
    """
    weighted, ones = columns / seconds[:, None], np.ones(len(seconds))
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    weighted = weighted / scale
    best, best_error = np.zeros(columns.shape[1]), math.inf
    for size in range(1, columns.shape[1] + 1):
        for used in map(list, itertools.combinations(range(columns.shape[1]), size)):
            found, *_ = np.linalg.lstsq(weighted[:, used], ones, rcond=None)
            error = float(np.sum((weighted[:, used] @ found - ones) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[used] = found
    a, b, c = (float(value) for value in best / scale)
    return a, b, c
