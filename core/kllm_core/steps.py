"""What the planner and the pool reconciler decide. Pure.

The planner writes desired counts of both pools in one decision; the reconciler turns (desired, observed) into steps, of
which a substrate executes one safe one at a time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kllm_core.objectives import Role


class Request(enum.StrEnum):
    """What a person may ask of one instance."""

    DRAIN = "Drain"
    FLIP = "Flip"


class StartFrom(enum.StrEnum):
    """From where a new instance comes, fastest first; each has its own measured time."""

    GATE = "Gate"
    SLOT = "Slot"
    NEW = "New"


@dataclass(frozen=True)
class Start:
    """One more instance of `role`."""

    role: Role
    source: StartFrom = StartFrom.NEW


@dataclass(frozen=True)
class Prepare:
    """One more slot, declared by the pool of `role`: all of an instance but the server."""

    role: Role


@dataclass(frozen=True)
class Cancel:
    """Give up an instance that is not serving yet; it costs nothing."""

    instance_id: str


@dataclass(frozen=True)
class Drain:
    """Send nothing new to an instance and let it finish or hand over what it has.

    Attributes:
        to: the role that it shall have then; None: it leaves.
    """

    instance_id: str
    to: Role | None = None


@dataclass(frozen=True)
class Stop:
    """End a drained (or dead) instance."""

    instance_id: str


@dataclass(frozen=True)
class Flip:
    """Let a drained instance serve the other role: drain + switch + a lost prefix cache instead of a start."""

    instance_id: str
    to: Role


Step = Start | Prepare | Cancel | Drain | Stop | Flip


@dataclass(frozen=True)
class DesiredCounts:
    """Instances wanted of both roles, decided together.

    Attributes:
        reason: CamelCase, from a closed set; goes into conditions, events and metrics.
        message: one sentence for people, with the numbers that decided.
    """

    prefill: int
    decode: int
    reason: str
    message: str

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 0:
            raise ValueError(f"counts must not be negative, got {self.prefill} prefill, {self.decode} decode")

    def of(self, role: Role) -> int:
        """The count of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True)
class StepDecision:
    """One step, or none, and why."""

    step: Step | None
    reason: str
    message: str
