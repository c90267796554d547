"""Percentiles of latency histograms with the bounds that all components share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kllm_core.metrics import LATENCY_BOUNDS_SECONDS

BUCKETS = len(LATENCY_BOUNDS_SECONDS) + 1


def total(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The sum, bucket by bucket; histograms of another length are left out."""
    whole = [counts for counts in histograms if len(counts) == BUCKETS]
    return [sum(bucket) for bucket in zip(*whole, strict=True)] if whole else [0] * BUCKETS


def percentile_seconds(counts: Sequence[int], percentile: float) -> float | None:
    """Seconds below which `percentile` percent lie, spread evenly within a bucket; None of an empty histogram.

    What lies above the last bound counts as lying at it.
    """
    wanted = sum(counts) * percentile / 100
    if wanted <= 0:
        return None
    below = 0.0
    for index, count in enumerate(counts[:-1]):
        if below + count >= wanted:
            low = LATENCY_BOUNDS_SECONDS[index - 1] if index else 0.0
            return low + (LATENCY_BOUNDS_SECONDS[index] - low) * (wanted - below) / count
        below += count
    return LATENCY_BOUNDS_SECONDS[-1]
