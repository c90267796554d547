"""Slots that are kept ready beside the instances, and the first to go when those need the budget. Pure."""

from __future__ import annotations

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Cancel, Prepare, StepDecision
from kllm_operator.plan.members import Member
from kllm_operator.plan.pools import Pools
from kllm_operator.plan.rollout import Rollout


class Slots:
    """The rules for slots.

    Args:
        pools: what there is.
        rollout: what replacements need.
    """

    def __init__(self, pools: Pools, rollout: Rollout) -> None:
        self._pools, self._limits, self._rollout = pools, pools.limits, rollout

    def drop_unwanted(self) -> StepDecision | None:
        """Give up a slot that nothing may be started from."""
        for member in self._pools.idle():
            if member.unwanted:
                why = "is of an old revision" if member.outdated else "shall leave"
                return StepDecision(Cancel(member.id), "CancelSlot", f"slot {member.id} {why}")
        return None

    def drop(self) -> StepDecision | None:
        """Give up a slot that is above its pool's number, or whose accelerators are needed.

        Needed are those above the budget, also of what is missing: a slot that serves it needs none of its own, and
        `start` has taken such a slot.
        """
        for role in Role:
            there = self._pools.idle(role)
            if len(there) > self._limits.of(role).slots:
                return StepDecision(Cancel(_least(there).id), "CancelSlot", self._says(role, "one slot is too many"))
        if self._limits.fits(self._pools.held_gpus + self._needed_gpus()):
            return None
        able = [member for member in self._pools.idle() if self._limits.of(member.role).gpus]
        if not able:
            return None
        least = _least(able)
        return StepDecision(Cancel(least.id), "FreeSlot", f"slot {least.id} holds accelerators that instances need")

    def prepare(self) -> StepDecision | None:
        """Make one more slot, if the budget has room for it beside all instances that are to come."""
        for role in self._short():
            if self._fits(role):
                return StepDecision(Prepare(role), "PrepareSlot", self._says(role, "one more slot"))
        return None

    def waits(self) -> str | None:
        """Why there are fewer slots than there shall be, in CamelCase; None if there are not."""
        if self._short():
            return "NoRoomForSlots"
        preparing = any(member.state is InstanceState.STARTING for member in self._pools.idle())
        return "WaitingForSlot" if preparing else None

    def _short(self) -> list[Role]:
        short = [role for role in Role if len(self._pools.idle(role)) < self._limits.of(role).slots]
        held_back = self._pools.goal.held_back
        return [role for role in short if role not in held_back and not self._rollout.stopped(role)]

    def _fits(self, role: Role) -> bool:
        return self._limits.fits(self._pools.held_gpus + self._needed_gpus() + self._limits.of(role).gpus)

    def _needed_gpus(self) -> int:
        return self._pools.missing_gpus + self._rollout.reserved_gpus

    def _says(self, role: Role, what: str) -> str:
        return f"{what}: {role} has {len(self._pools.idle(role))}, wants {self._limits.of(role).slots}"


def _least(slots: list[Member]) -> Member:
    """The slot that is worth least: one that is not ready yet, then the youngest."""
    return min(slots, key=lambda each: (each.state is not InstanceState.STARTING, each.age_seconds, each.id))
