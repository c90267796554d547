"""Everything that the status of a service follows from, at one moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kllm_core.conditions import Reason
from kllm_core.fleet import InstanceState
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.loop.report import Report
from kllm_operator.substrate.base import Observed


@dataclass(frozen=True)
class Verdict:
    """Whether a spec was accepted.

    Attributes:
        reason: Valid, or why it was refused.
        message: for people; empty when it was accepted.
    """

    accepted: bool = True
    reason: Reason = Reason.VALID
    message: str = ""


@dataclass(frozen=True)
class Trouble:
    """Why something that belongs to the service cannot be made."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Routers:
    """What is known of the routers.

    Attributes:
        desired: replicas of the Deployment; None while there is none.
        ready: that take requests.
        reason: why fewer are ready; Starting if nothing is known to be wrong.
        message: the same for people.
        knows_fleet: a ready one has found an instance of each role that takes requests; None: not asked.
        unshared: why they do not hear each other though they are to; empty when they do.
    """

    desired: int | None = None
    ready: int = 0
    reason: str = Reason.STARTING
    message: str = ""
    knows_fleet: bool | None = None
    unshared: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of one service.

    Attributes:
        generation: of the spec that was evaluated.
        verdict: on that spec.
        service: the last accepted spec; None if none was.
        revisions: of what each role's pool makes.
        report: of the control loop's last tick; None before the first.
        routers: of the service.
        trouble: with objects beside the instances; None when all are as they shall be.
        paused: by annotation.
    """

    generation: int
    verdict: Verdict = field(default_factory=Verdict)
    service: InferenceService | None = None
    revisions: Mapping[Role, str] = field(default_factory=dict)
    report: Report | None = None
    routers: Routers = field(default_factory=Routers)
    trouble: Trouble | None = None
    paused: bool = False

    def instances(self, role: Role) -> list[Observed]:
        """Instances of a role that are not being ended; slots are none."""
        return [each for each in self._staying(role) if not each.slot]

    def slots(self, role: Role) -> list[Observed]:
        """Slots of a role's pool."""
        return [each for each in self._staying(role) if each.slot]

    def serving(self, role: Role) -> int:
        """Instances of a role that take requests."""
        return sum(each.state is InstanceState.SERVING for each in self.instances(role))

    def desired(self, role: Role) -> int:
        """Instances of a role that are wanted, as far as it is known."""
        if self.report is not None:
            return self.report.desired.of(role)
        return 0 if self.service is None else self.service.spec.role(role).min_replicas

    def _staying(self, role: Role) -> list[Observed]:
        if self.report is None:
            return []
        return [each for each in self.report.snapshot.observed if each.role is role and not each.ending]
