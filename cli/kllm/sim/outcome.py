"""What came of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Attainment:
    """Shares of all requests that arrived; rejected, failed and unfinished ones have met nothing.

    Attributes:
        both: that met both objectives.
        tpot: that met theirs; an answer of one token has none to miss.
    """

    both: float
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Percentiles:
    """Of one latency, in seconds, over the requests that have it; None without any."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class Requests:
    """How requests ended. The last four add up to the first.

    Attributes:
        rejected: refused, or left without an instance for too long.
        failed: lost with their instances too often, or never taken by a decode instance.
        unfinished: not at an end when the run was.
        retracted: times that an engine took KV from a running request.
        moved: times that one went on elsewhere since its instance died.
    """

    arrived: int
    finished: int
    rejected: int
    failed: int
    unfinished: int
    retracted: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Decision:
    """Counts that were decided, with the reason.

    Attributes:
        at: seconds.
        desired: by pool.
        serving: by pool, at that moment.
        loads: by role, for `slo`: the planner's own account of them.
        why: for `slo`: what the planner weighed it against, as of `kllm_operator.loop.account`.
    """

    at: float
    desired: Mapping[str, int]
    serving: Mapping[str, int]
    reason: str
    message: str
    loads: Mapping[str, Any] | None = None
    why: Mapping[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        told = {
            "at_seconds": round(self.at, 3),
            "desired": dict(self.desired),
            "serving": dict(self.serving),
            "reason": self.reason,
            "message": self.message,
        }
        accounts = {"loads": self.loads, "why": self.why}
        return told | {name: account for name, account in accounts.items() if account is not None}


@dataclass(frozen=True)
class Point:
    """The service at one moment; mappings are by pool.

    Attributes:
        at: seconds.
        rate: requests per second since the point before.
        desired: instances.
        serving: instances.
        starting: instances, and slots on their way.
        draining: instances.
        idle: slots.
        queued: requests that wait: for an instance, for prefill, or for room on decode.
        parked: requests whose KV waits on prefill.
        running: requests in steps.
        kv_use: share of the pool's KV in use.
        loads: by role, for `slo`.
        attained: share of the requests that arrived since the point before and met both objectives; None without any.
    """

    at: float
    rate: float
    desired: Mapping[str, int]
    serving: Mapping[str, int]
    starting: Mapping[str, int]
    draining: Mapping[str, int]
    idle: Mapping[str, int]
    queued: Mapping[str, int]
    parked: int
    running: Mapping[str, int]
    kv_use: Mapping[str, float]
    loads: Mapping[str, float | None] = field(default_factory=dict)
    attained: float | None = None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "at_seconds": round(self.at, 3),
            "rate": round(self.rate, 3),
            "desired": dict(self.desired),
            "serving": dict(self.serving),
            "starting": dict(self.starting),
            "draining": dict(self.draining),
            "idle": dict(self.idle),
            "queued": dict(self.queued),
            "parked": self.parked,
            "running": dict(self.running),
            "kv_use": {pool: round(share, 4) for pool, share in self.kv_use.items()},
            "loads": dict(self.loads),
            "attained": None if self.attained is None else round(self.attained, 4),
        }


@dataclass(frozen=True)
class Speed:
    """Of the simulation itself.

    Attributes:
        wall_seconds: that it took.
        cpu_seconds: of one core, that it used.
        output_tokens_per_second: simulated per second of those.
        events: that it went through.
    """

    wall_seconds: float
    cpu_seconds: float
    output_tokens_per_second: float
    events: int


@dataclass(frozen=True)
class Outcome:
    """One run. GPU times are from allocation to release: slots, starting, serving, draining.

    Attributes:
        simulated_seconds: that GPU time is counted over.
        gpu_seconds: of all pools.
        cost: GPU seconds times price.
        pool_gpu_seconds: the same by pool; an instance that flips counts for the role that it has.
        mean_replicas: GPU seconds of a pool, over the GPUs of an instance and the simulated time.
        peak: most GPUs at a time.
        flips: changes of role.
        starts: of instances, those that serve from the beginning left out.
        stages: percentiles by stage: queue, prefill, bind, transfer.
        cached_share: part of the prompt tokens that prefix caches spared.
        is_interrupted: it was stopped; all numbers are of what had happened by then.
    """

    policy: str
    seed: int
    requests: Requests
    attainment: Attainment
    ttft: Percentiles
    tpot: Percentiles
    simulated_seconds: float
    gpu_seconds: float
    cost: float
    pool_gpu_seconds: Mapping[str, float]
    mean_replicas: Mapping[str, float]
    peak: int
    flips: int
    starts: int
    cancelled: int
    failures: int
    output_tokens: int
    cached_share: float
    stages: Mapping[str, Percentiles]
    decisions: tuple[Decision, ...]
    series: tuple[Point, ...]
    speed: Speed
    is_interrupted: bool = False

    def document(self, *, with_speed: bool = True) -> dict[str, Any]:
        """For JSON.

        Args:
            with_speed: tell how fast the simulation was, the only part that differs between two runs of one seed.
        """
        told: dict[str, Any] = {
            "version": VERSION,
            "policy": self.policy,
            "seed": self.seed,
            "interrupted": self.is_interrupted,
            "requests": vars(self.requests),
            "attainment": {name: round(share, 6) for name, share in vars(self.attainment).items()},
            "simulated_seconds": round(self.simulated_seconds, 3),
            "gpu_seconds": round(self.gpu_seconds, 3),
            "cost": round(self.cost, 3),
            "pool_gpu_seconds": {pool: round(seconds, 3) for pool, seconds in self.pool_gpu_seconds.items()},
            "mean_replicas": {pool: round(count, 4) for pool, count in self.mean_replicas.items()},
            "peak": self.peak,
            "flips": self.flips,
            "starts": self.starts,
            "cancelled": self.cancelled,
            "failures": self.failures,
            "ttft_seconds": _rounded(self.ttft),
            "tpot_seconds": _rounded(self.tpot),
            "stage_seconds": {stage: _rounded(values) for stage, values in self.stages.items()},
            "output_tokens": self.output_tokens,
            "cached_share": round(self.cached_share, 4),
            "decisions": [decision.document() for decision in self.decisions],
            "series": [point.document() for point in self.series],
        }
        if with_speed:
            told["speed"] = {
                "wall_seconds": round(self.speed.wall_seconds, 3),
                "cpu_seconds": round(self.speed.cpu_seconds, 3),
                "output_tokens_per_second": round(self.speed.output_tokens_per_second),
                "events": self.speed.events,
            }
        return told


def _rounded(values: Percentiles) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 6) for name, value in vars(values).items()}
