"""What a decision was weighed against, and how that is said to people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kllm_core.objectives import Role
from kllm_operator.plan.burst import Burst
from kllm_operator.plan.outlook import Outlook
from kllm_operator.plan.role_load import RoleLoad


@dataclass(frozen=True)
class RoleWhy:
    """What the count of one role was weighed against.

    Attributes:
        before, after: its counts.
        needs: the least count that demand ahead asks for, whatever bounds and budget allow.
        forecasts: loads ahead with the counts around both, in their order.
        held_seconds: for how long one instance fewer would have done; None when it would not.
        patience_seconds: for how long that must hold until it goes.
    """

    role: Role
    before: int
    after: int
    needs: int
    forecasts: tuple[RoleLoad, ...]
    held_seconds: float | None
    patience_seconds: float

    def forecast(self, count: int) -> RoleLoad:
        """The load ahead with one of the counts."""
        return next(each for each in self.forecasts if each.count == max(1, count))

    @property
    def words(self) -> str:
        """For people."""
        load = self.forecast(self.before)
        stays = f"{self.role} stays at {self.after}"
        change = stays if self.after == self.before else f"{self.role} {self.before} to {self.after}"
        if load.load.value is None or load.term is None:
            return f"{change}: load unknown"
        said = f"{change}: load {load.load.value:.2f} with {load.count} ({load.term}, {load.load.source})"
        if self.after != self.before:
            then = self.forecast(self.after).load.value
            said += f", forecast {then:.2f} with {self.after}" if then is not None and self.after else ""
        elif self.held_seconds is not None:
            said += f", {self.after - 1} would do for {self.held_seconds:.0f} of {self.patience_seconds:.0f} s"
        return f"{said}, needs {self.needs}" if self.needs > self.after else said


@dataclass(frozen=True)
class Alternative:
    """Other counts, what they cost, and what load they leave.

    Attributes:
        cost: of an hour.
        loads: ahead, prefill first; None is unknown.
    """

    prefill: int
    decode: int
    cost: float
    loads: tuple[float | None, float | None]


@dataclass(frozen=True)
class Why:
    """What a decision was weighed against.

    Attributes:
        outlook: demand ahead; None while nothing of it is known.
        roles: that have instances, or may.
        cost: of an hour of the decided counts.
        alternatives: the neighbours that bounds and budget allow.
        burst: what nobody could have followed; None in all other cases.
    """

    outlook: Outlook | None
    roles: tuple[RoleWhy, ...]
    cost: float
    alternatives: tuple[Alternative, ...] = ()
    burst: Burst | None = None

    def of(self, role: Role) -> RoleWhy | None:
        """The part of one role."""
        return next((each for each in self.roles if each.role is role), None)

    @property
    def words(self) -> str:
        """For people."""
        return "; ".join(self._sentences())

    def _sentences(self) -> Iterable[str]:
        for each in self.roles:
            yield each.words
        if self.outlook is not None and max(self.outlook.level, self.outlook.expected) > 0:
            ahead = self.outlook
            most = max(ahead.high.values())
            yield (
                f"{ahead.level:.3g} requests/s by now, {ahead.expected:.3g} and hardly more than {most:.3g} "
                f"in {ahead.seconds:.0f} s"
            )
        if self.burst is not None:
            yield self.burst.words
