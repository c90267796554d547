"""What clients of this router saw, told to the operator: counts and latency histograms per stage."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from kllm_core.contracts.router.v1 import router_pb2, router_pb2_grpc
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_router.interfaces import EngineRequest, RequestSummary

_STAGES: Mapping[router_pb2.Stage, str] = {
    router_pb2.STAGE_QUEUE: "queue",
    router_pb2.STAGE_PREFILL: "prefill",
    router_pb2.STAGE_BIND: "bind",
    router_pb2.STAGE_TRANSFER: "transfer",
    router_pb2.STAGE_TTFT: "first_token",
    router_pb2.STAGE_TPOT: "per_output_token",
}
_COUNTERS = ("arrivals", "rejected", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
_BUCKETS = len(LATENCY_BOUNDS_SECONDS) + 1
_DEFAULT_MILLISECONDS = 1000
_LEAST_MILLISECONDS = 100
_MOST_MILLISECONDS = 60_000


@dataclass
class _Totals:
    """Since the router began."""

    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    buckets: dict[router_pb2.Stage, list[int]] = field(
        default_factory=lambda: {stage: [0] * _BUCKETS for stage in _STAGES}
    )
    sums: dict[router_pb2.Stage, float] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0.0))

    def copy(self) -> _Totals:
        return _Totals(
            dict(self.counters), {stage: list(counts) for stage, counts in self.buckets.items()}, dict(self.sums)
        )


class ServiceLevels:
    """Counts; `arrived` and `ended` are given to preparer and pairing as listeners."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self._totals = _Totals()

    def arrived(self, request: EngineRequest) -> None:
        """A valid request has come."""
        self._totals.counters["arrivals"] += 1
        self._totals.counters["prompt_tokens"] += len(request.input_ids)

    def ended(self, summary: RequestSummary) -> None:
        """A request has ended, however it did."""
        counters = self._totals.counters
        if summary.status == 429:
            counters["rejected"] += 1
        elif summary.status >= 500:
            counters["failed"] += 1
        counters["cached_tokens"] += summary.usage.cached_tokens or 0
        counters["output_tokens"] += summary.usage.completion_tokens or 0
        for stage, name in _STAGES.items():
            seconds = getattr(summary.times, name)
            if seconds is not None:
                self._totals.buckets[stage][bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
                self._totals.sums[stage] += seconds

    def snapshot(self) -> _Totals:
        """Totals as they are now."""
        return self._totals.copy()


class ServiceLevelsService(router_pb2_grpc.ServiceLevelsServicer):
    """Answers WatchServiceLevels.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, levels: ServiceLevels, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._levels = levels
        self._clock = clock

    async def WatchServiceLevels(  # noqa: N802  the contract's name
        self, request: router_pb2.WatchServiceLevelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.ServiceLevelReport]:
        """A report each interval, with what happened in it."""
        milliseconds = request.interval_milliseconds or _DEFAULT_MILLISECONDS
        if not _LEAST_MILLISECONDS <= milliseconds <= _MOST_MILLISECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"interval_milliseconds must be {_LEAST_MILLISECONDS} to {_MOST_MILLISECONDS}, or 0",
            )
        sequence, last, last_at = 0, self._levels.snapshot(), self._clock()
        while True:
            await asyncio.sleep(milliseconds / 1000)
            sequence, now, now_at = sequence + 1, self._levels.snapshot(), self._clock()
            yield _report(self._levels.router_id, sequence, now_at - last_at, last, now)
            last, last_at = now, now_at


def _report(
    router_id: str, sequence: int, seconds: float, last: _Totals, now: _Totals
) -> router_pb2.ServiceLevelReport:
    stages = []
    for stage, counts in now.buckets.items():
        added = [after - before for before, after in zip(last.buckets[stage], counts, strict=True)]
        if any(added):
            total = now.sums[stage] - last.sums[stage]
            stages.append(router_pb2.StageLatency(stage=stage, counts=added, sum_seconds=total))
    return router_pb2.ServiceLevelReport(
        sequence=sequence,
        router_id=router_id,
        interval_seconds=seconds,
        stages=stages,
        **{name: now.counters[name] - last.counters[name] for name in _COUNTERS},
    )
