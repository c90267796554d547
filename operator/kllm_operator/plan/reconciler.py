"""From (desired, observed) to at most one safe next step. Pure.

Called again after each step, it converges, and each prefix of its steps is safe: a plan that is cut off leaves no pool
below its minimum and no accelerator above the budget. Draining instances hold their accelerators, so that a budget
that is used up is freed before anything new starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Cancel, Drain, Flip, Start, StartFrom, StepDecision, Stop
from kllm_operator.plan.drain_order import drain_order
from kllm_operator.plan.invariants import check
from kllm_operator.plan.members import Goal, Member

_IDLE = (InstanceState.SLOT, InstanceState.GATED)


def next_step(goal: Goal, members: Sequence[Member]) -> StepDecision:
    """The next step, or none with the reason for it.

    Raises:
        UnsafeStepError: the rules would break a promise; nothing may be done then.
    """
    pools = _Pools(goal, members)
    rules = (pools.stop_dead, pools.cancel, pools.flip, pools.start, pools.drain, pools.stop_drained, pools.free_slot)
    for rule in rules:
        decision = rule()
        if decision is not None:
            check(decision.step, goal, members)
            return decision
    return pools.nothing()


class _Pools:
    """Both pools, counted once; it lives as long as one call of `next_step`."""

    def __init__(self, goal: Goal, members: Sequence[Member]) -> None:
        self.goal, self.limits = goal, goal.limits
        self.members = sorted((member for member in members if not member.ending), key=lambda member: member.id)
        self.counts = Counter((member.role, member.state) for member in self.members)
        self.ending = len(members) - len(self.members)
        self.wanted = {role: goal.wanted(role) for role in Role}
        self.held_gpus = sum(self.limits.of(member.role).gpus for member in members)
        self.flipping = self._flipping()

    def stop_dead(self) -> StepDecision | None:
        for member in self._in(InstanceState.FAILED):
            return StepDecision(Stop(member.id), "StopFailed", f"{member.role} {member.id} has failed")
        return None

    def cancel(self) -> StepDecision | None:
        for role in Role:
            starting = [each for each in self._in(InstanceState.STARTING) if each.role is role]
            if starting and self._coming(role) > self.wanted[role]:
                newest = min(starting, key=lambda each: (each.age_seconds, each.id))
                return StepDecision(Cancel(newest.id), "CancelSurplus", self._says(role, f"{newest.id} is not needed"))
        return None

    def flip(self) -> StepDecision | None:
        to, chosen = self.goal.flip_to, self.flipping
        if to is None or chosen is None:
            return None
        if chosen.state is InstanceState.SERVING:
            return StepDecision(Drain(chosen.id), "DrainToFlip", self._says(to, f"{chosen.id} shall become {to}"))
        if chosen.empty:
            return StepDecision(Flip(chosen.id, to), "FlipDrained", self._says(to, f"{chosen.id} is empty"))
        return None

    def start(self) -> StepDecision | None:
        short = [role for role in Role if self._missing(role) > 0 and role not in self.goal.held_back]
        # The pool that has the smaller part of what it should have comes first.
        for role in sorted(short, key=lambda each: self._coming(each) / self.wanted[each]):
            source = self._source(role)
            if source is not None:
                return StepDecision(Start(role, source), "StartMissing", self._says(role, f"one more from {source}"))
        return None

    def drain(self) -> StepDecision | None:
        for role in Role:
            serving = self._serving(role)
            if len(serving) > self.wanted[role]:
                chosen = drain_order(serving)[0]
                return StepDecision(Drain(chosen.id), "DrainSurplus", self._says(role, f"{chosen.id} leaves"))
        return None

    def stop_drained(self) -> StepDecision | None:
        for member in self._in(InstanceState.DRAINING):
            if member.drained:
                why = "is empty" if member.empty else "has not become empty in time"
                return StepDecision(Stop(member.id), "StopDrained", f"{member.role} {member.id} {why}")
        return None

    def free_slot(self) -> StepDecision | None:
        """Give up an idle slot whose accelerators are above the budget, or would be if what is missing started."""
        extra = sum(self._missing(role) * self.limits.of(role).gpus for role in Role)
        # A slot that serves what is missing needs no accelerators of its own; `start` has taken those.
        if self.limits.fits(self.held_gpus + extra):
            return None
        for member in sorted(self._in(*_IDLE), key=lambda each: (each.age_seconds, each.id)):
            if self.limits.of(member.role).gpus:
                return StepDecision(Cancel(member.id), "FreeSlot", f"{member.id} holds accelerators above the budget")
        return None

    def nothing(self) -> StepDecision:
        missing = {role for role in Role if self._missing(role)}
        if missing and missing <= self.goal.held_back:
            return StepDecision(None, "StartHeldBack", self._both())
        if missing and not self.counts_of(InstanceState.DRAINING) and not self.ending:
            return StepDecision(None, "BudgetExhausted", self._both())
        if self.counts_of(InstanceState.DRAINING):
            return StepDecision(None, "WaitingForDrain", self._both())
        if self.ending:
            return StepDecision(None, "WaitingForStop", self._both())
        if self.counts_of(InstanceState.STARTING):
            return StepDecision(None, "WaitingForStart", self._both())
        return StepDecision(None, "Converged", self._both())

    def counts_of(self, state: InstanceState) -> int:
        return sum(self.counts[role, state] for role in Role)

    def _in(self, *states: InstanceState) -> list[Member]:
        return [member for member in self.members if member.state in states]

    def _serving(self, role: Role) -> list[Member]:
        return [member for member in self._in(InstanceState.SERVING) if member.role is role]

    def _coming(self, role: Role) -> int:
        return self.counts[role, InstanceState.SERVING] + self.counts[role, InstanceState.STARTING]

    def _missing(self, role: Role) -> int:
        """Instances to start; the one that is being flipped is as good as there."""
        flips = 1 if self.flipping is not None and self.goal.flip_to is role else 0
        return max(0, self.wanted[role] - self._coming(role) - flips)

    def _flipping(self) -> Member | None:
        """The instance that changes its role: one that drains already, else the first to drain of a surplus."""
        to = self.goal.flip_to
        if to is None or not self.limits.same_gpus or self._coming(to) >= self.wanted[to]:
            return None
        able = [member for member in self.members if member.role is to.other and member.flippable]
        leaving = [member for member in able if member.state is InstanceState.DRAINING]
        usable = [member for member in leaving if member.empty or not member.drain_overdue]
        if usable:
            return drain_order(usable)[0]
        serving = self._serving(to.other)
        if len(serving) <= self.wanted[to.other]:
            return None
        return next(iter(drain_order(member for member in serving if member.flippable)), None)

    def _source(self, role: Role) -> StartFrom | None:
        """The fastest way to one more instance; None while the budget does not allow it."""
        if self.counts[role, InstanceState.GATED] and self.limits.fits(self.held_gpus):
            return StartFrom.GATE
        slots = self.counts[role, InstanceState.SLOT]
        if self.limits.same_gpus:
            slots = self.counts_of(InstanceState.SLOT)
        if slots and self.limits.fits(self.held_gpus):
            return StartFrom.SLOT
        return StartFrom.NEW if self.limits.fits(self.held_gpus + self.limits.of(role).gpus) else None

    def _says(self, role: Role, what: str) -> str:
        serving, starting = self.counts[role, InstanceState.SERVING], self.counts[role, InstanceState.STARTING]
        return f"{what}: {role} has {serving} serving and {starting} starting, wants {self.wanted[role]}"

    def _both(self) -> str:
        budget = "no budget" if self.limits.gpu_budget is None else f"of {self.limits.gpu_budget}"
        return (
            f"{'; '.join(self._says(role, role.value) for role in Role)}; {self.held_gpus} accelerators held, {budget}"
        )
