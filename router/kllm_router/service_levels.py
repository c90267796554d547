"""What clients of this router saw, told to the operator: counts and latency histograms per stage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
    router_pb2.STAGE_PREFILLED: "prefilled",
    router_pb2.STAGE_HANDOVER: "handover",
}
_COUNTERS = (
    "arrivals", "rejected", "failed", "prompt_tokens", "prompt_token_squares", "cached_tokens", "output_tokens",
)  # fmt: skip
_BUCKETS = len(LATENCY_BOUNDS_SECONDS) + 1
_DEFAULT_MILLISECONDS = 1000
_LEAST_MILLISECONDS = 100
_MOST_MILLISECONDS = 60_000


@dataclass
class Totals:
    """Since the router began."""

    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    buckets: dict[router_pb2.Stage, list[int]] = field(
        default_factory=lambda: {stage: [0] * _BUCKETS for stage in _STAGES}
    )
    sums: dict[router_pb2.Stage, float] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0.0))

    def plus(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(
            {name: count + other.counters[name] for name, count in self.counters.items()},
            {
                stage: [one + two for one, two in zip(counts, other.buckets[stage], strict=True)]
                for stage, counts in self.buckets.items()
            },
            {stage: seconds + other.sums[stage] for stage, seconds in self.sums.items()},
        )

    def numbers(self) -> list[float]:
        """All of it, in an order that depends on nothing but the code."""
        counts = [count for stage in _STAGES for count in self.buckets[stage]]
        return [*(self.counters[name] for name in _COUNTERS), *counts, *(self.sums[stage] for stage in _STAGES)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Totals:
        """What `numbers` was taken of."""
        counters, rest = numbers[: len(_COUNTERS)], numbers[len(_COUNTERS) :]
        buckets = {stage: [int(n) for n in rest[i * _BUCKETS : (i + 1) * _BUCKETS]] for i, stage in enumerate(_STAGES)}
        sums = rest[len(_STAGES) * _BUCKETS :]
        return cls(
            {name: int(count) for name, count in zip(_COUNTERS, counters, strict=True)},
            buckets,
            dict(zip(_STAGES, sums, strict=True)),
        )


class ServiceLevels:
    """Counts; `arrived` and `ended` are given to preparer and pairing as listeners.

    Attributes:
        own: what this process saw.
        others: what other workers of this router saw.
        others_waiting: how many requests wait at them.

    Args:
        waiting: how many requests wait for instances to start.
        unshared: why other routers are not heard though they are to be; empty when they are.
    """

    def __init__(
        self, router_id: str, *, waiting: Callable[[], int] = lambda: 0, unshared: Callable[[], str] = lambda: ""
    ) -> None:
        self.router_id = router_id
        self.own = Totals()
        self.others = Totals()
        self.others_waiting = 0
        self.waiting_here = waiting
        self.unshared = unshared
        self._urgent = asyncio.Event()

    def arrived(self, request: EngineRequest) -> None:
        """A valid request has come."""
        counters, tokens = self.own.counters, len(request.input_ids)
        counters["arrivals"] += 1
        counters["prompt_tokens"] += tokens
        counters["prompt_token_squares"] += tokens * tokens

    def ended(self, summary: RequestSummary) -> None:
        """A request has ended, however it did."""
        counters = self.own.counters
        if summary.status == 429:
            counters["rejected"] += 1
        elif summary.status >= 500:
            counters["failed"] += 1
        counters["cached_tokens"] += summary.usage.cached_tokens or 0
        counters["output_tokens"] += summary.usage.completion_tokens or 0
        for stage, name in _STAGES.items():
            seconds = getattr(summary.times, name)
            if seconds is not None:
                self.own.buckets[stage][bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
                self.own.sums[stage] += seconds

    def hurry(self) -> None:
        """Have everything told soon, whenever the next report is due: somebody waits for it to be known."""
        self._urgent.set()
        self._urgent = asyncio.Event()

    @property
    def hurried(self) -> asyncio.Event:
        """Is set at the next `hurry`."""
        return self._urgent

    def waiting(self) -> int:
        """How many requests wait for instances to start."""
        return self.waiting_here() + self.others_waiting

    def snapshot(self) -> Totals:
        """Totals as they are now."""
        return self.own.plus(self.others)


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
        """A report each interval, or earlier when it is urgent, with what happened since the one before."""
        milliseconds = request.interval_milliseconds or _DEFAULT_MILLISECONDS
        if not _LEAST_MILLISECONDS <= milliseconds <= _MOST_MILLISECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"interval_milliseconds must be {_LEAST_MILLISECONDS} to {_MOST_MILLISECONDS}, or 0",
            )
        sequence, last, last_at = 0, self._levels.snapshot(), self._clock()
        while True:
            hurried = self._levels.hurried
            await asyncio.sleep(_LEAST_MILLISECONDS / 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((milliseconds - _LEAST_MILLISECONDS) / 1000):
                    await hurried.wait()
            sequence, now, now_at = sequence + 1, self._levels.snapshot(), self._clock()
            yield _report(self._levels, sequence, now_at - last_at, last, now)
            last, last_at = now, now_at


def _report(
    levels: ServiceLevels, sequence: int, seconds: float, last: Totals, now: Totals
) -> router_pb2.ServiceLevelReport:
    stages = []
    for stage, counts in now.buckets.items():
        added = [after - before for before, after in zip(last.buckets[stage], counts, strict=True)]
        if any(added):
            total = now.sums[stage] - last.sums[stage]
            stages.append(router_pb2.StageLatency(stage=stage, counts=added, sum_seconds=total))
    return router_pb2.ServiceLevelReport(
        sequence=sequence,
        router_id=levels.router_id,
        interval_seconds=seconds,
        stages=stages,
        waiting=levels.waiting(),
        unshared=levels.unshared(),
        **{name: now.counters[name] - last.counters[name] for name in _COUNTERS},
    )
