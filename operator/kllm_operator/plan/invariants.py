"""What no step may ever break, checked on each step before anyone carries it out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kllm_core.fleet import InstanceState
from kllm_core.steps import Cancel, Drain, Flip, Prepare, Start, StartFrom, Step, Stop
from kllm_operator.plan.members import Goal, Member

_NOT_SERVING_YET = (InstanceState.SLOT, InstanceState.GATED, InstanceState.STARTING)


class UnsafeStepError(RuntimeError):
    """A step would break a promise."""


def check(step: Step | None, goal: Goal, members: Sequence[Member]) -> None:
    """Refuse a step that must not be taken from here.

    Raises:
        UnsafeStepError: with the promise that it breaks.
    """
    broken = breach(step, goal, members)
    if broken is not None:
        raise UnsafeStepError(f"{step}: {broken}")


def breach(step: Step | None, goal: Goal, members: Sequence[Member]) -> str | None:
    """The promise that a step breaks, or None."""
    if step is None:
        return None
    if isinstance(step, Start | Prepare):
        return _start(step, goal, members)
    member = next((each for each in members if each.id == step.instance_id), None)
    if member is None:
        return "there is no such instance"
    return _drain(member, goal, members) if isinstance(step, Drain) else _others(step, member)


def _start(step: Start | Prepare, goal: Goal, members: Sequence[Member]) -> str | None:
    pool = goal.limits.of(step.role)
    slots = sum(each.is_idle and each.role is step.role and not each.ending for each in members)
    if isinstance(step, Prepare) and slots >= pool.slots:
        return f"{step.role} has all {pool.slots} slots already"
    held = sum(goal.limits.of(each.role).gpus for each in members)
    is_new = isinstance(step, Prepare) or step.source is StartFrom.NEW
    added = pool.gpus if is_new else 0
    return None if goal.limits.fits(held + added) else f"{held + added} accelerators are above the budget"


def _drain(member: Member, goal: Goal, members: Sequence[Member]) -> str | None:
    if member.state is not InstanceState.SERVING:
        return "it does not serve"
    there = (each for each in members if each.role is member.role and not each.ending)
    serving = sum(each.state is InstanceState.SERVING for each in there)
    least = goal.least(member)
    return None if serving > least else f"only {serving} {member.role} would be left to drain from, {least} must stay"


def _others(step: Flip | Stop | Cancel, member: Member) -> str | None:
    if isinstance(step, Flip):
        return None if member.empty and member.flippable and step.to is member.role.other else "it cannot flip"
    if isinstance(step, Stop):
        return None if member.drained or member.state is InstanceState.FAILED else "it may still have requests"
    return None if member.state in _NOT_SERVING_YET else f"{step.instance_id} serves already"
