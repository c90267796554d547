"""What a scaling law sees, and what it decides. Pure.

A law is asked every `interval_seconds` with one observation and answers with a count for each pool. It has no clock and
no randomness; what it must remember lies in the law object, so each simulated run makes its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kllm_core.objectives import Objectives
from kllm_core.timing import EngineTiming


class Pool(enum.StrEnum):
    """What the engines of a pool do. A service has the pool `ONE`, or the other two."""

    ONE = "one"
    """Whole requests."""
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class EngineView:
    """One serving engine, as its metrics say. Tokens and requests.

    Attributes:
        queued_requests: that hold no place in a batch: waiting for prefill or, on decode, for room.
        running_requests: in prefill or decode steps.
        queued_tokens: prompt tokens that must still be computed: of those that wait and the rest of those in prefill.
        kv_used_tokens: held by requests, whatever only a cache holds left out; on a prefill engine with parked KV.
        kv_total_tokens: that fit; 0 is unknown.
        utilisation: share of the window in which it computed, 0 to 1.
    """

    queued_requests: int = 0
    running_requests: int = 0
    queued_tokens: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    utilisation: float = 0.0

    @property
    def kv_use(self) -> float:
        """Share of the KV pool in use; 0 where its size is unknown."""
        return self.kv_used_tokens / self.kv_total_tokens if self.kv_total_tokens > 0 else 0.0

    @property
    def requests(self) -> int:
        """All that it has."""
        return self.queued_requests + self.running_requests


@dataclass(frozen=True)
class PoolView:
    """One pool.

    Attributes:
        engines: those that serve.
        starting: instances on their way to serve.
        desired: the count last decided.
        draining: instances that take nothing new and are not gone.
        waiting_requests: that the router holds since no engine of the pool can take them.
        waiting_tokens: prompt tokens of those.
    """

    engines: tuple[EngineView, ...] = ()
    starting: int = 0
    desired: int = 0
    draining: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0

    @property
    def serving(self) -> int:
        """Engines that take requests."""
        return len(self.engines)

    @property
    def requests(self) -> int:
        """All requests of the pool, those that the router holds for it included."""
        return self.waiting_requests + sum(engine.requests for engine in self.engines)

    @property
    def queued_requests(self) -> int:
        """Those of them without a place in a batch."""
        return self.waiting_requests + sum(engine.queued_requests for engine in self.engines)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the pool must still compute."""
        return self.waiting_tokens + sum(engine.queued_tokens for engine in self.engines)

    @property
    def kv_use(self) -> float:
        """Sum of the engines' shares in use: 1.5 is one and a half pools' worth."""
        return sum(engine.kv_use for engine in self.engines)


@dataclass(frozen=True)
class Latencies:
    """One latency over the window, in seconds.

    Attributes:
        samples: requests in it; with none the other numbers mean nothing.
        values: of each of them in any order, for laws that read a histogram; empty where nothing keeps them.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    samples: int
    values: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Observation:
    """A service at one moment. Times in seconds.

    Attributes:
        time: since the run began.
        pools: by kind; those that the law was made for.
        window_seconds: over which the rest is taken; shorter than the law's own while the run is younger.
        arrived: requests that arrived in it.
        input_tokens: prompt tokens per request that arrived in it, mean; None without.
        cached_share: part of those prompt tokens that caches spared, 0 to 1.
        output_tokens: per request that finished in it, mean; None without.
        ttft: of requests whose first token came in it; None without.
        tpot: per output token after the first, of requests that finished in it; None without.
    """

    time: float
    pools: Mapping[Pool, PoolView]
    window_seconds: float = 0.0
    arrived: int = 0
    input_tokens: float | None = None
    cached_share: float = 0.0
    output_tokens: float | None = None
    ttft: Latencies | None = None
    tpot: Latencies | None = None

    @property
    def requests_per_second(self) -> float:
        """Rate of arrivals over the window."""
        return self.arrived / self.window_seconds if self.window_seconds > 0 else 0.0


@dataclass(frozen=True)
class Counts:
    """One decision of a law.

    Attributes:
        counts: instances wanted of each pool.
        reason: CamelCase.
        message: one sentence with the numbers that decided.
    """

    counts: Mapping[Pool, int]
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Bounds:
    """Least and most instances of one pool, and the accelerators of one."""

    least: int = 1
    most: int = 8
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least {self.least} and most {self.most} are no range from 0 up")
        if self.gpus < 1:
            raise ValueError(f"gpus must be at least 1, got {self.gpus}")

    def clamp(self, count: int) -> int:
        """The nearest count within the bounds."""
        return min(max(count, self.least), self.most)


@dataclass(frozen=True)
class Arrival:
    """A request of the future, for the one law that may know it.

    Attributes:
        time: since the run began, in seconds.
        input_tokens: of the prompt, those that must be computed.
        output_tokens: of the answer.
    """

    time: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Setup:
    """What a law is told once, before a run.

    Attributes:
        bounds: of each pool.
        objectives: of the service.
        timing: of the engines, as laws with a performance model have it from profiles.
        kv_total_tokens: KV pool of one engine.
        chunk_tokens: of one prefill step.
        start_seconds: from the decision to a serving instance.
        gpu_budget: most accelerators at a time; None: no limit.
        arrivals: all requests in the order of their times; only `clairvoyant` reads them.
    """

    bounds: Mapping[Pool, Bounds]
    objectives: Objectives
    timing: EngineTiming
    kv_total_tokens: int = 700_000
    chunk_tokens: int = 8192
    start_seconds: float = 60.0
    gpu_budget: int | None = None
    arrivals: tuple[Arrival, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if set(self.bounds) not in ({Pool.ONE}, {Pool.PREFILL, Pool.DECODE}):
            raise ValueError(f"pools must be one, or prefill and decode, got {sorted(self.bounds)}")

    def clamped(self, counts: Mapping[Pool, int]) -> dict[Pool, int]:
        """The nearest counts within the bounds."""
        return {pool: self.bounds[pool].clamp(count) for pool, count in counts.items()}


class Law(Protocol):
    """A scaling law in one run.

    Attributes:
        interval_seconds: between two questions.
        window_seconds: that the observation's window shall have.
    """

    interval_seconds: float
    window_seconds: float

    def decide(self, observation: Observation) -> Counts:
        """Counts of all pools.

        The first question is put at time 0 with empty pools: what it answers serves already when the run begins.
        """
        ...
