"""The state of both pools at one moment, for whoever asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts, StepDecision
from kllm_operator.fleet.snapshot import Snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.loop.account import why_document
from kllm_operator.loop.crashes import LastFailure, Pause
from kllm_operator.loop.events import load_document
from kllm_operator.loop.looking import LastStart
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.why import Why

_WARMING = frozenset({InstanceState.GATED, InstanceState.STARTING})
_LIMITED = frozenset({"ScalingLimited", "MaxReplicasReached", "BudgetExhausted"})
"""Reasons of counts that are not what load, or somebody, asks for."""


@dataclass(frozen=True)
class Limited:
    """Why counts are not what load, or somebody, asks for.

    Attributes:
        reason: ScalingLimited, MaxReplicasReached or BudgetExhausted.
    """

    reason: str
    message: str


def limited(desired: DesiredCounts, idle: StepDecision) -> Limited | None:
    """What limits the counts that are carried out, or keeps them from being reached; None if nothing does."""
    found = next((each for each in (desired, idle) if each.reason in _LIMITED), None)
    return None if found is None else Limited(found.reason, found.message)


@dataclass(frozen=True)
class PoolReport:
    """One role at one moment. Counts are of instances and slots that are not being ended.

    Attributes:
        desired: instances that there shall be.
        warming: instances on their way.
        slots: that are ready.
        slots_warming: on their way.
        outdated: instances of another revision than starts would make.
        held_back: since when failures keep new ones from starting; None when they do not.
        stopped: how the new revision failed, if it replaces nothing more for it.
        last_failure: how the last instance failed, if none that starts make now has served since.
        trouble: why the last start was not possible, if it was not.
        last_start: None while none is known.
    """

    desired: int
    ready: int
    warming: int
    draining: int
    failed: int
    slots: int
    slots_wanted: int
    slots_warming: int
    outdated: int
    held_back: Pause | None
    stopped: str | None
    last_failure: LastFailure | None
    trouble: str | None
    last_start: LastStart | None

    @classmethod
    def of(
        cls,
        role: Role,
        seen: Snapshot,
        *,
        desired: int,
        slots_wanted: int,
        held_back: Pause | None,
        stopped: str | None,
        last_failure: LastFailure | None,
        trouble: str | None,
        last_start: LastStart | None,
    ) -> PoolReport:
        """Count a role's instances and slots.

        Args:
            role: of the pool.
            seen: all instances.
            desired: as told of the attribute, like all that follow.
            slots_wanted: as above.
            held_back: as above.
            stopped: as above.
            last_failure: as above.
            trouble: as above.
            last_start: as above.
        """
        there = [each for each in seen.members if each.role is role and not each.ending]
        instances = Counter(each.state for each in there if not each.is_idle)
        slots = Counter(each.state for each in there if each.is_idle)
        return cls(
            desired,
            ready=instances[InstanceState.SERVING],
            warming=sum(instances[state] for state in _WARMING),
            draining=instances[InstanceState.DRAINING],
            failed=instances[InstanceState.FAILED],
            slots=slots[InstanceState.SLOT],
            slots_wanted=slots_wanted,
            slots_warming=sum(slots[state] for state in _WARMING),
            outdated=sum(each.outdated and not each.is_idle for each in there),
            held_back=held_back,
            stopped=stopped,
            last_failure=last_failure,
            trouble=trouble,
            last_start=last_start,
        )

    def document(self) -> dict[str, Any]:
        """As JSON; what there never is on one machine is left out where it is not there."""
        counts = {
            "ready": self.ready,
            "warming": self.warming,
            "draining": self.draining,
            "failed": self.failed,
        }
        others = {"slots": self.slots, "slots_warming": self.slots_warming, "outdated": self.outdated}
        return counts | {name: count for name, count in others.items() if count}


@dataclass(frozen=True)
class Report:
    """What the loop saw and decided in one tick.

    Attributes:
        desired: what is carried out.
        advised: what the planner would have, if it only advises.
        idle: why no further step is taken.
        limited: why counts are not what load, or somebody, asks for; None when they are.
        requests: why what people asked for is not done yet, by instance.
        why: what the plan was weighed against.
    """

    desired: DesiredCounts
    advised: DesiredCounts | None
    loads: tuple[RoleLoad, RoleLoad]
    snapshot: Snapshot
    told: Mapping[str, Told]
    paused: bool
    idle: StepDecision
    limited: Limited | None
    pools: Mapping[Role, PoolReport]
    requests: Mapping[str, str]
    why: Why | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": 1,
            "reason": self.desired.reason,
            "message": self.desired.message,
            "paused": self.paused,
            "waits_for": {"reason": self.idle.reason, "message": self.idle.message},
            "why": None if self.why is None else why_document(self.why),
            "pools": {load.role.value: self._pool(load.role, load) for load in self.loads},
            "instances": {
                each.id: {
                    "role": each.role,
                    "state": each.state,
                    "message": each.message,
                    "pacing": told.pacing if (told := self.told.get(each.id)) else "",
                }
                for each in self.snapshot.observed
            },
        }

    def _pool(self, role: Role, load: RoleLoad) -> dict[str, Any]:
        return {
            "load": load_document(load),
            "desired": self.desired.of(role),
            "advised": None if self.advised is None else self.advised.of(role),
            **self.pools[role].document(),
        }
