"""Replacing instances that serve: those of an old revision, and those that a person wants gone. Pure.

A new one comes first, as far as the budget allows; the old one drains when that has proven itself. Prefill and decode
take turns, so that the parts of both that are replaced never differ by more than one instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Drain, Start, StepDecision
from kllm_operator.plan.drain_order import drain_order
from kllm_operator.plan.members import Goal, Member
from kllm_operator.plan.pools import Pools


def stopped_roles(goal: Goal, members: Sequence[Member]) -> Mapping[Role, str]:
    """Roles whose rollout is stopped, and how the new revision failed last."""
    rollout = Rollout(Pools(goal, members))
    return {role: goal.failing[role] for role in Role if rollout.stopped(role)}


class Rollout:
    """The rules for what is unwanted but serves, and what it forbids to other rules.

    Args:
        pools: what there is.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools, self._limits = pools, pools.limits
        self._unwanted = {role: [each for each in pools.serving(role) if each.unwanted] for role in Role}

    def replaces(self, role: Role) -> bool:
        """Whether anything of a role is to be replaced, and may be."""
        return bool(self._unwanted[role]) and not self.stopped(role)

    def stopped(self, role: Role) -> bool:
        """Whether the new revision is not tried any more, since it failed too often while the old one serves."""
        return role in self._pools.goal.failing and self._serves_old(role) and not self._is_proven(role)

    def may_start(self, role: Role) -> bool:
        """Whether one more instance of the new revision may be started.

        While none has proven itself there is at most one of it. Of a revision that failed too often none is started,
        unless fewer than `minReplicas` are left: the old one cannot be started any more.
        """
        if self.stopped(role) and self._pools.coming(role) >= self._limits.of(role).min_replicas:
            return False
        return not self._serves_old(role) or self._is_proven(role) or not self._fresh(role)

    @property
    def failure(self) -> str:
        """Why the rollout is stopped, to be added to a sentence."""
        failing = self._pools.goal.failing
        return "".join(f"; the new revision of {role} {failing[role]}" for role in Role if self.stopped(role))

    def allowed_surplus(self, role: Role) -> int:
        """Starts above the desired count that are not to be cancelled."""
        return self._limits.surge if self.replaces(role) else 0

    def surplus_to_drain(self, role: Role) -> list[Member]:
        """Those of which one may drain since enough others serve, the first to go first."""
        serving, wanted = self._pools.serving(role), self._pools.wanted[role]
        if self._unwanted[role]:
            enough = sum(map(_is_sure, serving)) > wanted
            return drain_order(self._unwanted[role]) if enough else []
        return drain_order(serving) if len(serving) > wanted else []

    def start(self) -> StepDecision | None:
        """One more than desired, so that an unwanted one can go."""
        if self._surplus() >= self._limits.surge:
            return None
        for role in self._turn():
            source = self._pools.source(role, spare_gpus=self._pools.missing_gpus)
            if source is not None:
                says = self._pools.says(role, f"one more from {source} to replace {self._first(role).id}")
                return StepDecision(Start(role, source), "StartReplacement", says)
        return None

    def drain(self) -> StepDecision | None:
        """With a budget that has no room for one more: drain an unwanted one before its replacement starts."""
        pools = self._pools
        in_motion = pools.in_state(InstanceState.DRAINING) or pools.in_state(InstanceState.STARTING) or pools.ending
        if in_motion or self._surplus() or any(pools.missing(role) for role in Role):
            return None
        for role in self._turn():
            first = self._first(role)
            if len(pools.serving(role)) > pools.goal.least(first):
                says = pools.says(role, f"{first.id} leaves before its replacement, for which there is no room")
                return StepDecision(Drain(first.id), "DrainToReplace", says)
        return None

    @property
    def reserved_gpus(self) -> int:
        """Accelerators that the next replacement needs and does not have yet."""
        pools = self._pools
        needed = max((self._limits.of(role).gpus for role in Role if self.replaces(role)), default=0)
        if not needed or not self._limits.surge:
            return 0
        leaving = sum(self._limits.of(each.role).gpus for each in pools.in_state(InstanceState.DRAINING))
        more = sum(pools.surplus(role) * self._limits.of(role).gpus for role in Role)
        return max(0, needed - leaving - more)

    def waits(self) -> str | None:
        """Why what is unwanted still serves, in CamelCase; None if nothing is, or something is under way."""
        if any(self.stopped(role) for role in Role):
            return "RolloutStopped"
        if not any(self._unwanted.values()):
            return None
        if any(self._unwanted[role] and not all(map(_is_sure, self._pools.serving(role))) for role in Role):
            return "WaitingForProof"
        held_back = any(self._unwanted[role] and role in self._pools.goal.held_back for role in Role)
        return "StartHeldBack" if held_back else "BudgetExhausted"

    def _turn(self) -> list[Role]:
        """Roles that may replace one now."""
        able = [role for role in Role if self.replaces(role) and not self._pools.missing(role)]
        able = [role for role in able if role not in self._pools.goal.held_back and self.may_start(role)]
        return [role for role in able if self._in_step(role)]

    def _in_step(self, role: Role) -> bool:
        """Whether it is the role's turn; what a person asks for waits for no other role."""
        if not self._serves_old(role.other) or any(not each.outdated for each in self._unwanted[role]):
            return True
        # With equal parts prefill goes first: a revision that does not start is then tried in one role only.
        mine, other = self._share(role), self._share(role.other)
        return not self.stopped(role.other) and (mine < other or (mine == other and role is Role.PREFILL))

    def _share(self, role: Role) -> float:
        """The part of a role that is of the new revision, or comes so."""
        return len(self._fresh(role)) / max(1, self._pools.wanted[role])

    def _first(self, role: Role) -> Member:
        """The one to be replaced next; who a person wants gone goes first."""
        return min(drain_order(self._unwanted[role]), key=lambda each: each.outdated)

    def _fresh(self, role: Role) -> list[Member]:
        there = [*self._pools.serving(role), *self._pools.starting(role)]
        return [each for each in there if not each.outdated]

    def _is_proven(self, role: Role) -> bool:
        return any(each.proven and not each.outdated for each in self._pools.serving(role))

    def _serves_old(self, role: Role) -> bool:
        return any(each.outdated for each in self._unwanted[role])

    def _surplus(self) -> int:
        return sum(self._pools.surplus(role) for role in Role)


def _is_sure(member: Member) -> bool:
    """Whether others may leave because of an instance that serves."""
    return member.proven or member.unwanted
