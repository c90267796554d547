"""What the loop tells: plans, steps and what became of them, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kllm_core.objectives import Load, Role
from kllm_core.steps import DesiredCounts, Prepare, Request, Start, Step
from kllm_operator.loop.capacity import Arrival
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.why import Why


class Event(Protocol):
    """Anything that is told."""

    @property
    def name(self) -> str:
        """Which kind it is."""

    @property
    def line(self) -> str:
        """For people."""

    def document(self) -> dict[str, Any]:
        """For programs."""


@dataclass(frozen=True)
class Planned:
    """Desired counts have changed, or the reason for them.

    Attributes:
        advise_only: nobody carries it out.
        why: what it was weighed against.
    """

    before: DesiredCounts | None
    desired: DesiredCounts
    loads: tuple[RoleLoad, RoleLoad]
    flip_to: Role | None = None
    advise_only: bool = False
    why: Why | None = None
    name: str = "plan"

    @property
    def line(self) -> str:
        """For people."""
        counts = ", ".join(self._count(role) for role in Role)
        advice = "advice" if self.advise_only else "plan"
        flip = f", one {self.flip_to.other} instance becomes {self.flip_to}" if self.flip_to else ""
        return f"{advice}: {counts}{flip} ({self.desired.reason}): {self.desired.message}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "before": None if self.before is None else _counts(self.before),
            "desired": _counts(self.desired),
            "flip_to": self.flip_to,
            "advise_only": self.advise_only,
            "reason": self.desired.reason,
            "message": self.desired.message,
            "loads": {load.role.value: load_document(load) for load in self.loads},
        }

    def _count(self, role: Role) -> str:
        after = self.desired.of(role)
        before = after if self.before is None else self.before.of(role)
        return f"{role} {after}" if before == after else f"{role} {before} -> {after}"


@dataclass(frozen=True)
class Stepped:
    """A step is carried out."""

    step: Step
    instance_id: str
    reason: str
    message: str
    name: str = "action"

    @property
    def line(self) -> str:
        """For people."""
        return f"{type(self.step).__name__.lower()} {self.instance_id} ({self.reason}): {self.message}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        role = self.step.role if isinstance(self.step, Start | Prepare) else getattr(self.step, "to", None)
        return {
            "step": type(self.step).__name__,
            "instance": self.instance_id,
            "role": role,
            "reason": self.reason,
            "message": self.message,
        }


@dataclass(frozen=True)
class Ended:
    """What became of a step.

    Attributes:
        error: why it failed; empty when it did not.
        seconds: that it took.
        switch_seconds: that the engine's switch of its role took, as its agent measured it.
    """

    step: Step
    instance_id: str
    seconds: float
    error: str = ""
    switch_seconds: float | None = None
    name: str = "outcome"

    @property
    def line(self) -> str:
        """For people."""
        what = f"{type(self.step).__name__.lower()} {self.instance_id}"
        if self.error:
            return f"{what} failed after {self.seconds:.1f} s: {self.error}"
        switch = f", the switch alone {self.switch_seconds:.2f} s" if self.switch_seconds is not None else ""
        return f"{what} done in {self.seconds:.1f} s{switch}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step": type(self.step).__name__,
            "instance": self.instance_id,
            "seconds": round(self.seconds, 3),
            "switch_seconds": self.switch_seconds,
            "error": self.error or None,
        }


@dataclass(frozen=True)
class Serving:
    """An instance began to serve."""

    arrival: Arrival
    name: str = "capacity"

    @property
    def line(self) -> str:
        """For people."""
        took = f", {self.arrival.seconds:.1f} s after the decision" if self.arrival.seconds is not None else ""
        return f"{self.arrival.instance_id} serves {self.arrival.role}{took}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        seconds = self.arrival.seconds
        return {
            "instance": self.arrival.instance_id,
            "role": self.arrival.role,
            "how": self.arrival.how,
            "source": self.arrival.source,
            "decision_to_serving_seconds": None if seconds is None else round(seconds, 3),
        }


@dataclass(frozen=True)
class Failed:
    """An instance failed by itself.

    Attributes:
        then: what follows, for people.
    """

    instance_id: str
    role: Role
    message: str
    then: str
    name: str = "failure"

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.instance_id} {self.message}; it {self.then}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {"instance": self.instance_id, "role": self.role, "message": self.message, "then": self.then}


@dataclass(frozen=True)
class Requested:
    """What becomes of something that a person asked of an instance.

    Attributes:
        accepted: whether it is done, as soon as that is safe.
        message: why not, or what follows.
    """

    instance_id: str
    request: Request
    accepted: bool
    message: str
    name: str = "request"

    @property
    def line(self) -> str:
        """For people."""
        answer = "will be done" if self.accepted else "is refused"
        return f"{self.request.value.lower()} of {self.instance_id} {answer}: {self.message}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "instance": self.instance_id,
            "request": self.request,
            "accepted": self.accepted,
            "message": self.message,
        }


@dataclass(frozen=True)
class Rollout:
    """The new revision of a role replaces nothing more.

    Attributes:
        message: how it failed last.
    """

    role: Role
    reason: str
    message: str
    name: str = "rollout"

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.role} {self.reason}: its new revision {self.message}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {"role": self.role, "reason": self.reason, "message": self.message}


@dataclass(frozen=True)
class CountsNotWritten:
    """What the planner decided is not what the pools ask for."""

    desired: DesiredCounts
    message: str
    name: str = "counts"

    @property
    def line(self) -> str:
        """For people."""
        return f"prefill {self.desired.prefill}, decode {self.desired.decode} could not be written: {self.message}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {"desired": _counts(self.desired), "message": self.message}


def load_document(load: RoleLoad) -> dict[str, Any]:
    """A role's load with its terms."""
    return {
        "count": load.count,
        **_load(load.load),
        "term": load.term,
        "strain": _round(load.strain),
        "complete": load.complete,
        "terms": {each.term.value: {**_load(each.load), "limit": _round(each.limit)} for each in load.terms},
    }


def _load(load: Load) -> dict[str, Any]:
    return {
        "value": _round(load.value),
        "predicted": _round(load.predicted),
        "measured": _round(load.measured),
        "source": load.source,
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _counts(counts: DesiredCounts) -> dict[str, int]:
    return {role.value: counts.of(role) for role in Role}
