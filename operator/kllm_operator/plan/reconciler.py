"""From (desired, observed) to at most one safe next step. Pure.

Called again after each step, it converges, and each prefix of its steps is safe: a plan that is cut off leaves no pool
below its minimum and no accelerator above the budget. Draining instances hold their accelerators, so that a budget
that is used up is freed before anything new starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Cancel, Drain, Flip, Start, StepDecision, Stop
from kllm_operator.plan.invariants import check
from kllm_operator.plan.members import Goal, Member
from kllm_operator.plan.pools import Pools
from kllm_operator.plan.rollout import Rollout
from kllm_operator.plan.slots import Slots


def next_step(goal: Goal, members: Sequence[Member]) -> StepDecision:
    """The next step, or none with the reason for it.

    Raises:
        UnsafeStepError: the rules would break a promise; nothing may be done then.
    """
    rules = _Rules(Pools(goal, members))
    for rule in rules.in_order():
        decision = rule()
        if decision is not None:
            check(decision.step, goal, members)
            return decision
    return rules.nothing()


class _Rules:
    """The rules in their order; it lives as long as one call of `next_step`."""

    def __init__(self, pools: Pools) -> None:
        self.pools, self.goal = pools, pools.goal
        self.rollout = Rollout(pools)
        self.slots = Slots(pools, self.rollout)

    def in_order(self) -> tuple[Callable[[], StepDecision | None], ...]:
        """Instances first, then slots."""
        return (
            self.stop_dead, self.cancel, self.slots.drop_unwanted, self.flip, self.start, self.rollout.start,
            self.drain, self.rollout.drain, self.stop_drained, self.slots.drop, self.slots.prepare,
        )  # fmt: skip

    def stop_dead(self) -> StepDecision | None:
        for member in self.pools.members:
            if member.state is InstanceState.FAILED:
                return StepDecision(Stop(member.id), "StopFailed", f"{member.role} {member.id} has failed")
        return None

    def cancel(self) -> StepDecision | None:
        for role in Role:
            starting = sorted(self.pools.starting(role), key=lambda each: (each.age_seconds, each.id))
            unwanted = [each for each in starting if each.unwanted]
            if unwanted:
                why = "is of an old revision" if unwanted[0].outdated else "shall leave"
                says = self.pools.says(role, f"{unwanted[0].id} {why} and does not serve yet")
                return StepDecision(Cancel(unwanted[0].id), "CancelUnwanted", says)
            if starting and self.pools.surplus(role) > self.rollout.allowed_surplus(role):
                says = self.pools.says(role, f"{starting[0].id} is not needed")
                return StepDecision(Cancel(starting[0].id), "CancelSurplus", says)
        return None

    def flip(self) -> StepDecision | None:
        to, chosen = self.goal.flip_to, self.pools.flipping
        if to is None or chosen is None:
            return None
        if chosen.state is InstanceState.SERVING:
            says = self.pools.says(to, f"{chosen.id} shall become {to}")
            return StepDecision(Drain(chosen.id, to), "DrainToFlip", says)
        if chosen.empty:
            return StepDecision(Flip(chosen.id, to), "FlipDrained", self.pools.says(to, f"{chosen.id} is empty"))
        return None

    def start(self) -> StepDecision | None:
        short = [role for role in Role if self.pools.missing(role) > 0 and role not in self.goal.held_back]
        short = [role for role in short if self.rollout.may_start(role)]
        # The pool that has the smaller part of what it should have comes first.
        for role in sorted(short, key=lambda each: self.pools.coming(each) / self.pools.wanted[each]):
            source = self.pools.source(role)
            if source is not None:
                says = self.pools.says(role, f"one more from {source}")
                return StepDecision(Start(role, source), "StartMissing", says)
        return None

    def drain(self) -> StepDecision | None:
        for role in Role:
            for first in self.rollout.surplus_to_drain(role)[:1]:
                if first.unwanted:
                    says = self.pools.says(role, f"{first.id} is replaced")
                    return StepDecision(Drain(first.id), "DrainReplaced", says)
                return StepDecision(Drain(first.id), "DrainSurplus", self.pools.says(role, f"{first.id} leaves"))
        return None

    def stop_drained(self) -> StepDecision | None:
        for member in self.pools.in_state(InstanceState.DRAINING):
            if member.drained:
                why = "is empty" if member.empty else "has not become empty in time"
                return StepDecision(Stop(member.id), "StopDrained", f"{member.role} {member.id} {why}")
        return None

    def nothing(self) -> StepDecision:
        """No step, and the first reason that applies."""
        pools, waits = self.pools, self.rollout.waits()
        missing = {role for role in Role if pools.missing(role)}
        leaving = bool(pools.in_state(InstanceState.DRAINING)) or pools.ending > 0
        short = any(self.rollout.may_start(role) for role in missing)
        reasons = {
            "RolloutStopped": waits == "RolloutStopped" and not leaving,
            "StartHeldBack": bool(missing) and missing <= self.goal.held_back,
            "BudgetExhausted": short and not leaving,
            "WaitingForDrain": bool(pools.in_state(InstanceState.DRAINING)),
            "WaitingForStop": pools.ending > 0,
            "WaitingForStart": bool(pools.in_state(InstanceState.STARTING)),
        }
        reason = next((each for each, holds in reasons.items() if holds), waits or self.slots.waits() or "Converged")
        why = self.rollout.failure if reason == "RolloutStopped" else ""
        return StepDecision(None, reason, pools.says_both() + why)
