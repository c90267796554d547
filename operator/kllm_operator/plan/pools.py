"""Both pools as the reconciler's rules see them, counted once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Request, StartFrom
from kllm_operator.plan.drain_order import drain_order
from kllm_operator.plan.members import Goal, Member


class Pools:
    """Goal and members; it lives as long as one call of `next_step`.

    Attributes:
        members: those that steps are for, in the order of their ids; the others are being ended.
        ending: how many are being ended.
        held_gpus: accelerators of all, those that are being ended included.
    """

    def __init__(self, goal: Goal, members: Sequence[Member]) -> None:
        self.goal, self.limits = goal, goal.limits
        self.members = sorted((member for member in members if not member.ending), key=lambda member: member.id)
        self.ending = len(members) - len(self.members)
        self.wanted = {role: goal.wanted(role) for role in Role}
        self.held_gpus = sum(self.limits.of(member.role).gpus for member in members)
        self._serving = {role: self.of(role, InstanceState.SERVING) for role in Role}
        self._starting = {role: self.of(role, InstanceState.STARTING) for role in Role}
        self.flipping = self._flipping()

    def of(self, role: Role, *states: InstanceState) -> list[Member]:
        """Instances of a role in some states; slots are none."""
        there = (member for member in self.members if member.role is role and not member.is_idle)
        return [member for member in there if member.state in states]

    def in_state(self, state: InstanceState) -> list[Member]:
        """Instances of both roles in one state."""
        return [member for role in Role for member in self.of(role, state)]

    def idle(self, role: Role | None = None) -> list[Member]:
        """Slots of a role, or of both."""
        return [member for member in self.members if member.is_idle and role in {None, member.role}]

    def serving(self, role: Role) -> list[Member]:
        """Instances that take requests."""
        return self._serving[role]

    def starting(self, role: Role) -> list[Member]:
        """Instances that will serve."""
        return self._starting[role]

    def coming(self, role: Role) -> int:
        """Instances that serve or will."""
        return len(self._serving[role]) + len(self._starting[role])

    def missing(self, role: Role) -> int:
        """Instances to start; the one that is being flipped is as good as there."""
        flips = 1 if self.flipping is not None and self.goal.flip_to is role else 0
        return max(0, self.wanted[role] - self.coming(role) - flips)

    @property
    def missing_gpus(self) -> int:
        """Accelerators of all that is missing."""
        return sum(self.missing(role) * self.limits.of(role).gpus for role in Role)

    def surplus(self, role: Role) -> int:
        """Instances above the desired count."""
        return max(0, self.coming(role) - self.wanted[role])

    def source(self, role: Role, *, spare_gpus: int = 0) -> StartFrom | None:
        """The fastest way to one more instance; None while the budget does not allow it.

        Args:
            role: of the instance.
            spare_gpus: accelerators that something else needs first.
        """
        usable = [member for member in self.idle() if not member.unwanted]
        if self.limits.fits(self.held_gpus + spare_gpus):
            if any(member.state is InstanceState.GATED and member.role is role for member in usable):
                return StartFrom.GATE
            able = [member for member in usable if member.role is role or self.limits.alike]
            if any(member.state is InstanceState.SLOT for member in able):
                return StartFrom.SLOT
        fits = self.limits.fits(self.held_gpus + spare_gpus + self.limits.of(role).gpus)
        return StartFrom.NEW if fits else None

    def says(self, role: Role, what: str) -> str:
        """A sentence with the numbers of a role."""
        serving, starting = len(self.serving(role)), len(self.starting(role))
        return f"{what}: {role} has {serving} serving and {starting} starting, wants {self.wanted[role]}"

    def says_both(self) -> str:
        """The numbers of both roles and of the budget."""
        budget = "no budget" if self.limits.gpu_budget is None else f"of {self.limits.gpu_budget}"
        return (
            f"{'; '.join(self.says(role, role.value) for role in Role)}; {self.held_gpus} accelerators held, {budget}"
        )

    def _flipping(self) -> Member | None:
        """The instance that changes its role: one that drains already, else the first to drain of a surplus."""
        to = self.goal.flip_to
        if to is None or not self.limits.alike or self.coming(to) >= self.wanted[to]:
            return None
        able = [member for member in self.members if member.role is to.other and member.flippable]
        able = [member for member in able if not member.unwanted]
        leaving = [member for member in able if member.state is InstanceState.DRAINING]
        usable = [member for member in leaving if member.empty or not member.drain_overdue]
        if usable:
            return _first_to_flip(usable)
        serving = [member for member in able if member.state is InstanceState.SERVING]
        if len(self.serving(to.other)) <= self.wanted[to.other] or not serving:
            return None
        return _first_to_flip(serving)


def _first_to_flip(members: Sequence[Member]) -> Member:
    """That which a person asks for, else the first to drain."""
    return min(drain_order(members), key=lambda member: member.requested is not Request.FLIP)
