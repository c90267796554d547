"""A quantile as a histogram tells it: linear inside of the bucket that it falls into. Pure.

Source: `histogram_quantile` of the Prometheus documentation, and the buckets of llm-d-router's latencies. What lies in
one bucket is told apart no further: TPOTs of 21 to 39 ms all have a P90 of 38 ms. A law with thresholds between the
objective's halves sees that coarseness as much as the load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

TTFT_BOUNDS = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
"""Upper bounds in seconds."""
TPOT_BOUNDS = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5,
    2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 48.0, 60.0, 90.0, 120.0, 180.0, 270.0, 360.0,
)  # fmt: skip
"""Upper bounds in seconds."""


def quantile(share: float, values: Sequence[float], bounds: Sequence[float]) -> float:
    """The value below which `share` of `values` lie; beyond the last bound that bound, 0 without values.

    Args:
        share: 0 to 1.
        values: any order.
        bounds: of the buckets, ascending.
    """
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    rank, below = share * len(values), 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * max(0.0, rank - below) / count
        below += count
    return bounds[-1] if values else 0.0
