"""Adds up what came of the requests of a run."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kllm.bench.row import Status
from kllm.sim.flights import Flight
from kllm.sim.outcome import Attainment, Percentiles, Point, Requests
from kllm_core.objectives import Objectives

_STAGES = ("queue", "prefill", "bind", "transfer")


def attainment(flights: Sequence[Flight], objectives: Objectives) -> Attainment:
    """Shares of all of them; 0 without any."""
    ttft = [_meets_ttft(flight, objectives) for flight in flights]
    tpot = [_meets_tpot(flight, objectives) for flight in flights]
    both = sum(first and second for first, second in zip(ttft, tpot, strict=True))
    number = max(1, len(flights))
    return Attainment(both / number, sum(ttft) / number, sum(tpot) / number)


def requests(flights: Sequence[Flight], *, retracted: int, moved: int) -> Requests:
    """How they ended."""
    by_status = Counter(flight.status for flight in flights)
    return Requests(
        len(flights), by_status[Status.OK], by_status[Status.REJECTED], by_status[Status.FAILED],
        by_status[Status.UNFINISHED], retracted, moved,
    )  # fmt: skip


def percentiles(seconds: Iterable[float | None]) -> Percentiles:
    """Of those that are known; linear between two."""
    known = [value for value in seconds if value is not None]
    if not known:
        return Percentiles(None, None, None, None, None)
    values = np.percentile(known, (50, 90, 95, 99))
    return Percentiles(float(np.mean(known)), *(float(value) for value in values))


def stages(flights: Sequence[Flight]) -> dict[str, Percentiles]:
    """Percentiles of the stages of those that have passed them."""
    passed = [flight.stages for flight in flights]
    return {name: percentiles(each.get(name) for each in passed) for name in _STAGES}


def cached_share(flights: Sequence[Flight]) -> float:
    """Part of the prompt tokens that caches spared, over the requests whose prompts were computed."""
    computed = [flight for flight in flights if flight.parked_at is not None]
    tokens = sum(flight.input_tokens for flight in computed)
    return sum(flight.cached_tokens for flight in computed) / tokens if tokens else 0.0


def with_attained(points: Sequence[Point], flights: Sequence[Flight], objectives: Objectives) -> tuple[Point, ...]:
    """The points, each with the share of those requests that arrived since the one before."""
    times = [point.at for point in points]
    arrived, met = [0] * len(points), [0] * len(points)
    for flight in flights:
        place = bisect_left(times, flight.at)
        if place < len(points):
            arrived[place] += 1
            met[place] += _meets_ttft(flight, objectives) and _meets_tpot(flight, objectives)
    return tuple(
        replace(point, attained=good / number if number else None)
        for point, good, number in zip(points, met, arrived, strict=True)
    )


def _meets_ttft(flight: Flight, objectives: Objectives) -> bool:
    return flight.status is Status.OK and flight.ttft is not None and flight.ttft <= objectives.ttft_seconds


def _meets_tpot(flight: Flight, objectives: Objectives) -> bool:
    return flight.status is Status.OK and (flight.tpot or 0.0) <= objectives.tpot_seconds
