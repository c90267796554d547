"""Who serves, and what of it is fresh enough to be believed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kllm_core.fleet import EngineLoad, Fleet
from kllm_core.objectives import Role
from kllm_operator.plan.demand import known


@dataclass(frozen=True)
class Seen:
    """A fleet as loads are judged from it.

    Attributes:
        serving: instances that take requests, by role.
        fresh: loads of those that are not too old, by role.
    """

    fleet: Fleet
    stale_after_seconds: float
    serving: Mapping[Role, int]
    fresh: Mapping[Role, tuple[EngineLoad, ...]]

    @classmethod
    def of(cls, fleet: Fleet, stale_after_seconds: float) -> Seen:
        """Look at a fleet.

        Args:
            fleet: with the loads of its instances.
            stale_after_seconds: above this age a load is unknown.
        """

        def is_fresh(load: EngineLoad) -> bool:
            age = known(load.age_seconds)
            return age is not None and age <= stale_after_seconds

        loads = {role: [each.load for each in fleet.of(role) if each.takes_requests] for role in Role}
        fresh = {role: tuple(load for load in loads[role] if load is not None and is_fresh(load)) for role in Role}
        return cls(fleet, stale_after_seconds, {role: len(loads[role]) for role in Role}, fresh)
