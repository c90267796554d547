"""What the pool reconciler is given: what there is, and what shall be. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts, Request


@dataclass(frozen=True)
class Member:
    """One instance, or one slot, as it was observed.

    Attributes:
        in_flight: requests it has, parked ones included; None when unknown.
        age_seconds: since the step that made it.
        drain_overdue: its drain has passed the deadline, so that it may be stopped with what it has.
        ending: it is being ended already; until it is gone it holds its accelerators, and no step is for it.
        slot: while it starts, it becomes a slot and no instance.
        outdated: a start would make another revision.
        requested: what a person asks of it.
        proven: it has served for long enough that another one may go because of it.
    """

    id: str
    role: Role
    state: InstanceState
    flippable: bool = False
    in_flight: int | None = None
    age_seconds: float = 0.0
    drain_overdue: bool = False
    ending: bool = False
    slot: bool = False
    outdated: bool = False
    requested: Request | None = None
    proven: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether it is a slot, gated or on its way to be one: accelerators without an instance."""
        preparing = self.slot and self.state is InstanceState.STARTING
        return preparing or self.state in {InstanceState.SLOT, InstanceState.GATED}

    @property
    def unwanted(self) -> bool:
        """Whether it shall go as soon as another one can take its place."""
        return self.outdated or self.requested is Request.DRAIN

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
        gpus: accelerators of one instance, or of one slot.
        slots: that are kept ready beside the instances, as long as the budget has room for them.
        price: of one accelerator and hour, in any unit that both pools share.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    gpus: int = 1
    slots: int = 0
    price: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} and maxReplicas {self.max_replicas} are no range from 0 up"
            )
        if self.gpus < 0:
            raise ValueError(f"gpus must not be negative, got {self.gpus}")
        if self.slots < 0:
            raise ValueError(f"slots must not be negative, got {self.slots}")
        if not (math.isfinite(self.price) and self.price >= 0):
            raise ValueError(f"price must be a finite number, not negative, got {self.price}")

    def clamp(self, count: int) -> int:
        """The nearest count within the limits."""
        return min(max(count, self.min_replicas), self.max_replicas)


@dataclass(frozen=True)
class Limits:
    """Limits of both pools.

    Attributes:
        gpu_budget: most accelerators at a time, whatever the state of the instance; None: no limit.
        surge: most instances above both desired counts together while others are replaced, within the budget.
        max_unavailable: how many fewer than `minReplicas` of a role may serve while others are replaced, for budgets
            that have no room for one more.
        interchangeable: an instance of one role may become one of the other.
    """

    prefill: PoolLimits
    decode: PoolLimits
    gpu_budget: int | None = None
    surge: int = 1
    max_unavailable: int = 0
    interchangeable: bool = True

    def __post_init__(self) -> None:
        if self.surge < 0 or self.max_unavailable < 0:
            raise ValueError(
                f"surge and max_unavailable must not be negative, got {self.surge} and {self.max_unavailable}"
            )
        needed = self.gpus(self.prefill.min_replicas, self.decode.min_replicas)
        if not self.fits(needed):
            raise ValueError(f"gpuBudget {self.gpu_budget} is below the {needed} accelerators of minReplicas")

    def of(self, role: Role) -> PoolLimits:
        """The limits of one pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    def gpus(self, prefill: int, decode: int) -> int:
        """Accelerators of so many instances."""
        return prefill * self.prefill.gpus + decode * self.decode.gpus

    def cost(self, prefill: int, decode: int) -> float:
        """Price of an hour of so many instances."""
        return prefill * self.prefill.gpus * self.prefill.price + decode * self.decode.gpus * self.decode.price

    def fits(self, gpus: int) -> bool:
        """Whether the budget allows so many accelerators."""
        return self.gpu_budget is None or gpus <= self.gpu_budget

    @property
    def alike(self) -> bool:
        """Whether an instance, or a slot, of one role can become one of the other."""
        return self.interchangeable and self.prefill.gpus == self.decode.gpus


@dataclass(frozen=True)
class Goal:
    """What the fleet shall become.

    Attributes:
        flip_to: the role that shall get an instance of the other one instead of a new one.
        held_back: roles of which nothing may start now, since their instances keep failing.
        failing: roles whose present revision has failed too often to replace another, and how it failed last.
    """

    desired: DesiredCounts
    limits: Limits
    flip_to: Role | None = None
    held_back: frozenset[Role] = frozenset()
    failing: Mapping[Role, str] = field(default_factory=dict)

    def wanted(self, role: Role) -> int:
        """The desired count within the pool's limits."""
        return self.limits.of(role).clamp(self.desired.of(role))

    def least(self, member: Member) -> int:
        """How many of the member's role must go on serving when it drains."""
        least = max(self.limits.of(member.role).min_replicas, min(1, self.wanted(member.role)))
        return max(0, least - self.limits.max_unavailable) if member.unwanted else least
