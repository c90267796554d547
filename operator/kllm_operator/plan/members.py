"""What the pool reconciler is given: what there is, and what shall be. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts


@dataclass(frozen=True)
class Member:
    """One instance as it was observed.

    Attributes:
        in_flight: requests it has, parked ones included; None when unknown.
        age_seconds: since the step that made it.
        drain_overdue: its drain has passed the deadline, so that it may be stopped with what it has.
        ending: it is being ended already; until it is gone it holds its accelerators, and no step is for it.
    """

    id: str
    role: Role
    state: InstanceState
    flippable: bool = False
    in_flight: int | None = None
    age_seconds: float = 0.0
    drain_overdue: bool = False
    ending: bool = False

    @property
    def empty(self) -> bool:
        """Whether a draining instance has nothing left."""
        return self.state is InstanceState.DRAINING and self.in_flight == 0

    @property
    def drained(self) -> bool:
        """Whether a draining instance may be stopped."""
        return self.state is InstanceState.DRAINING and (self.in_flight == 0 or self.drain_overdue)


@dataclass(frozen=True)
class PoolLimits:
    """Limits of one pool.

    Attributes:
        gpus: accelerators of one instance.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} and maxReplicas {self.max_replicas} are no range from 0 up"
            )
        if self.gpus < 0:
            raise ValueError(f"gpus must not be negative, got {self.gpus}")

    def clamp(self, count: int) -> int:
        """The nearest count within the limits."""
        return min(max(count, self.min_replicas), self.max_replicas)


@dataclass(frozen=True)
class Limits:
    """Limits of both pools.

    Attributes:
        gpu_budget: most accelerators at a time, whatever the state of the instance; None: no limit.
    """

    prefill: PoolLimits
    decode: PoolLimits
    gpu_budget: int | None = None

    def __post_init__(self) -> None:
        needed = self.gpus(self.prefill.min_replicas, self.decode.min_replicas)
        if not self.fits(needed):
            raise ValueError(f"gpuBudget {self.gpu_budget} is below the {needed} accelerators of minReplicas")

    def of(self, role: Role) -> PoolLimits:
        """The limits of one pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    def gpus(self, prefill: int, decode: int) -> int:
        """Accelerators of so many instances."""
        return prefill * self.prefill.gpus + decode * self.decode.gpus

    def fits(self, gpus: int) -> bool:
        """Whether the budget allows so many accelerators."""
        return self.gpu_budget is None or gpus <= self.gpu_budget

    @property
    def same_gpus(self) -> bool:
        """Whether an instance, or a slot, of one role is as large as one of the other."""
        return self.prefill.gpus == self.decode.gpus


@dataclass(frozen=True)
class Goal:
    """What the fleet shall become.

    Attributes:
        flip_to: the role that shall get an instance of the other one instead of a new one.
        held_back: roles of which nothing may start now, since their instances keep failing.
    """

    desired: DesiredCounts
    limits: Limits
    flip_to: Role | None = None
    held_back: frozenset[Role] = frozenset()

    def wanted(self, role: Role) -> int:
        """The desired count within the pool's limits."""
        return self.limits.of(role).clamp(self.desired.of(role))
