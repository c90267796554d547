"""The state of both pools at one moment, for whoever asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.fleet.snapshot import Snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.loop.events import load_document
from kllm_operator.plan.role_load import RoleLoad

_WARMING = (InstanceState.SLOT, InstanceState.GATED, InstanceState.STARTING)


@dataclass(frozen=True)
class Report:
    """What the loop saw and decided in one tick.

    Attributes:
        desired: what is carried out.
        advised: what the planner would have, if it only advises.
    """

    desired: DesiredCounts
    advised: DesiredCounts | None
    loads: tuple[RoleLoad, RoleLoad]
    snapshot: Snapshot
    told: Mapping[str, Told]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": 1,
            "reason": self.desired.reason,
            "message": self.desired.message,
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
        members = [each for each in self.snapshot.members if each.role is role and not each.ending]
        states = Counter(each.state for each in members)
        return {
            "load": load_document(load),
            "desired": self.desired.of(role),
            "advised": None if self.advised is None else self.advised.of(role),
            "ready": states[InstanceState.SERVING],
            "warming": sum(states[state] for state in _WARMING),
            "draining": states[InstanceState.DRAINING],
            "failed": states[InstanceState.FAILED],
        }
