"""Desired counts of both pools in one decision: the least GPU time that keeps both loads under 1. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.plan.account import reason_of, why_of
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.decision import Decision
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits
from kllm_operator.plan.memory import PlannerState
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.settings import PlannerSettings
from kllm_operator.plan.why import Why

__all__ = ["Plan", "PlannerState", "plan"]

_DEFAULTS = PlannerSettings()


@dataclass(frozen=True)
class Plan:
    """One decision.

    Attributes:
        flip_to: the role that should get an instance of the other one instead of a new one.
        advise_only: the counts are not to be written: the service is paused, or someone else scales it.
        state: for the next decision.
        loads: of both roles, with the instances that serve now.
        why: what it was weighed against.
    """

    desired: DesiredCounts
    flip_to: Role | None
    advise_only: bool
    state: PlannerState
    loads: tuple[RoleLoad, RoleLoad]
    why: Why


def plan(
    model: LoadModel,
    *,
    now: float,
    limits: Limits,
    state: PlannerState,
    times: CapacityTimes | None = None,
    settings: PlannerSettings = _DEFAULTS,
    advise_only: bool = False,
) -> Plan:
    """Decide both counts.

    Args:
        model: what load follows from.
        now: seconds on any clock that never goes back.
        limits: of both pools.
        state: of the last decision; `PlannerState()` at first.
        times: what a flip and a start cost; left out, nothing flips.
        settings: when counts change.
        advise_only: decide from what is there, since what is decided is not carried out.
    """
    begun = replace(state, prefill=None, decode=None, flip_to=None) if advise_only else state
    decision = Decision(model, now, limits, begun, times or CapacityTimes(), settings)
    decision.take()
    why = why_of(decision)
    desired = DesiredCounts(
        decision.counts[Role.PREFILL], decision.counts[Role.DECODE], reason_of(decision, why), why.words
    )
    following = decision.state(advise_only=advise_only)
    loads = (model.now(Role.PREFILL), model.now(Role.DECODE))
    return Plan(desired, decision.flip_to, advise_only, following, loads, why)
