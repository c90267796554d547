"""What is simulated: requests, engines, pools, and who decides their counts."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kllm.bench.plan import Planned
from kllm.sim.laws.base import Pool
from kllm_core.engine_model.spec import EngineSpec
from kllm_core.objectives import Binding, Objectives
from kllm_operator.loop.settings import LoopSettings
from kllm_router.scheduling.admission import AdmissionSettings

SLO = "slo"
"""The policy that is the operator's own loop."""


class ScenarioError(ValueError):
    """The scenario cannot be run; the text names the field."""


class Routing(enum.StrEnum):
    """How instances are chosen for requests."""

    KLLM = "kllm"
    """kLLM's router."""
    LEAST_LOAD = "least-load"
    """The instance with the fewest requests."""
    ROUND_ROBIN = "round-robin"
    DYNAMO = "dynamo"
    """The cost of Dynamo's KV router."""
    CACHE_AWARE = "cache-aware"
    """The policy of SMG (sglang-router)."""
    LLM_D = "llm-d"
    """The weights of llm-d's guides."""


class PrefillOrder(enum.StrEnum):
    """Which prompts enter a prefill step."""

    FCFS = "fcfs"
    """As they came, each to its end: SGLang's own order."""
    FAIR = "fair"
    """The engines' own policy, `kllm_engine.policy.fair_prefill`."""


@dataclass(frozen=True)
class StartTimes:
    """Seconds until an instance serves, by where it comes from.

    Attributes:
        new: of a new instance, from the decision to serving.
        slot: of one that is started in a slot.
        gate: of one whose server waits at the launch gate; None: slots hold no server.
        prepare: of a new slot, until it is one.
        switch: of an engine's change of role, once it is empty.
        spread: coefficient of variation; above 0 the times are drawn from log-normal distributions with these means.
    """

    new: float = 60.0
    slot: float = 10.0
    gate: float | None = None
    prepare: float = 60.0
    switch: float = 0.75
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("new", "slot", "gate", "prepare", "switch", "spread"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ScenarioError(f"starts.{name} must be a number of at least 0, got {value}")


@dataclass(frozen=True)
class Link:
    """How KV gets from prefill to decode.

    Attributes:
        base_seconds: of each transfer, the handshake included.
        seconds_per_token: at full bandwidth of one instance's link.
        shared: transfers that use a link at the same time share its bandwidth; otherwise each has it all.
    """

    base_seconds: float = 0.01
    seconds_per_token: float = 5e-6
    shared: bool = True

    def __post_init__(self) -> None:
        for name in ("base_seconds", "seconds_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ScenarioError(f"link.{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Failure:
    """An instance that dies.

    Attributes:
        at: seconds from the beginning.
        pool: whose oldest serving instance it is.
    """

    at: float
    pool: Pool


@dataclass(frozen=True)
class Failures:
    """Instances that die.

    Attributes:
        per_hour: of each serving instance, mean; the times are drawn.
        scripted: further ones.
    """

    per_hour: float = 0.0
    scripted: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise ScenarioError(f"failures.per_hour must be at least 0, got {self.per_hour}")


@dataclass(frozen=True)
class RouterSetup:
    """How the router works.

    Attributes:
        binding: when the decode instance is chosen.
        wait_seconds: for which a request waits while no instance of a role serves, before it is rejected.
        park_seconds: for which a prefilled request waits for a decode instance, before it fails.
        attempts: of a request whose instances die, the first included.
        admission: who is let in.
        hop_seconds: of a message between the router and an engine's scheduler, either way.
    """

    routing: Routing = Routing.KLLM
    binding: Binding = Binding.LATE
    wait_seconds: float = 5.0
    park_seconds: float = 120.0
    attempts: int = 3
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    hop_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hop_seconds < math.inf:
            raise ScenarioError(f"router.hop_seconds must be at least 0, got {self.hop_seconds}")


@dataclass(frozen=True)
class PoolSetup:
    """One pool.

    Attributes:
        least: instances at any time.
        most: instances at any time.
        gpus: of one instance.
        slots: kept ready beside the instances; only the operator's own loop uses them.
        initial: instances that serve when the run begins; None: what a law's first answer says, or `least`.
        price: of one GPU in any unit; cost is GPU time times price.
    """

    engine: EngineSpec
    least: int = 1
    most: int = 8
    gpus: int = 1
    slots: int = 0
    initial: int | None = None
    price: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        load: requests in the order of their times.
        policy: `slo`, or one of `kllm.sim.laws.registry`.
        pools: `Pool.ONE`, or `Pool.PREFILL` and `Pool.DECODE`.
        gpu_budget: most GPUs at a time; None: no limit.
        knobs: settings of the law other than its defaults, by name.
        loop: settings of the operator's loop, for `slo`.
        warm: the operator's loop knows the engines' timing and what starts take; otherwise it learns them.
        duration: seconds of the load; None: until the last request arrives.
        prefill_order: of prompts on each engine.
        grace: seconds after it in which requests may still end; those that do not are unfinished.
        count_from: requests that arrive before, and GPU time before, are not counted.
        sample_seconds: between two points of the timeline.
        seed: of all that is drawn.
    """

    load: tuple[Planned, ...]
    objectives: Objectives
    policy: str
    pools: Mapping[Pool, PoolSetup]
    gpu_budget: int | None = None
    starts: StartTimes = StartTimes()
    link: Link = Link()
    router: RouterSetup = RouterSetup()
    failures: Failures = Failures()
    knobs: Mapping[str, object] = field(default_factory=dict)
    loop: LoopSettings = field(default_factory=LoopSettings)
    warm: bool = True
    duration: float | None = None
    prefill_order: PrefillOrder = PrefillOrder.FCFS
    grace: float = 600.0
    count_from: float = 0.0
    sample_seconds: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if set(self.pools) not in ({Pool.ONE}, {Pool.PREFILL, Pool.DECODE}):
            raise ScenarioError(f"pools must be one, or prefill and decode, got {sorted(self.pools)}")
        for name, pool in self.pools.items():
            _check_pool(name, pool)
        _check_load(self.load)
        for field_name in ("grace", "count_from"):
            if not 0 <= getattr(self, field_name) < math.inf:
                raise ScenarioError(f"{field_name} must be at least 0, got {getattr(self, field_name)}")
        if not self.sample_seconds > 0:
            raise ScenarioError(f"sample_seconds must be above 0, got {self.sample_seconds}")

    @property
    def ends_at(self) -> float:
        """When the load ends, in seconds."""
        return self.load[-1].at if self.duration is None else max(self.duration, self.load[-1].at)


def _check_pool(name: Pool, pool: PoolSetup) -> None:
    if not 0 <= pool.least <= pool.most:
        raise ScenarioError(f"{name}: least {pool.least} and most {pool.most} are no range from 0 up")
    if pool.initial is not None and not 0 <= pool.initial <= pool.most:
        raise ScenarioError(f"{name}: initial must be 0 to {pool.most}, got {pool.initial}")
    if pool.gpus < 1:
        raise ScenarioError(f"{name}: gpus must be at least 1, got {pool.gpus}")


def _check_load(load: tuple[Planned, ...]) -> None:
    if not load:
        raise ScenarioError("load holds no requests")
    previous = 0.0
    for request in load:
        if not previous <= request.at < math.inf:
            raise ScenarioError(f"load: request {request.index} comes at {request.at}, after one at {previous}")
        if request.input_tokens < 1 or request.output_tokens < 1:
            raise ScenarioError(f"load: request {request.index} has fewer than one token of input or output")
        previous = request.at
