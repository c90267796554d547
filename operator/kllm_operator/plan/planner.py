"""Desired counts of both pools in one decision: the least GPU time that keeps both loads under 1. Pure.

The last decision is what counts are judged at, so that instances on their way count as capacity and a missing report
takes none away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.settings import PlannerSettings

Counts = Mapping[Role, int]
_DEFAULTS = PlannerSettings()


@dataclass(frozen=True)
class PlannerState:
    """What the planner must remember from one decision to the next.

    Attributes:
        prefill: the count last decided; None before the first decision.
        prefill_low_since: since when one instance fewer would do; None when it would not.
        flip_to: the role that is being given an instance of the other one.
    """

    prefill: int | None = None
    decode: int | None = None
    prefill_low_since: float | None = None
    decode_low_since: float | None = None
    flip_to: Role | None = None

    def count(self, role: Role) -> int | None:
        """The count last decided."""
        return self.prefill if role is Role.PREFILL else self.decode

    def low_since(self, role: Role) -> float | None:
        """Since when one instance fewer would do."""
        return self.prefill_low_since if role is Role.PREFILL else self.decode_low_since


@dataclass(frozen=True)
class Plan:
    """One decision.

    Attributes:
        flip_to: the role that should get an instance of the other one instead of a new one.
        advise_only: the counts are not to be written: the service is paused, or someone else scales it.
        state: for the next decision.
        loads: of both roles, with the instances that serve now.
    """

    desired: DesiredCounts
    flip_to: Role | None
    advise_only: bool
    state: PlannerState
    loads: tuple[RoleLoad, RoleLoad]


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
    decision = _Decision(model, now, limits, PlannerState() if advise_only else state, times, settings)
    decision.take()
    desired = DesiredCounts(decision.counts[Role.PREFILL], decision.counts[Role.DECODE], *decision.why())
    following = PlannerState(
        desired.prefill,
        desired.decode,
        decision.low_since[Role.PREFILL],
        decision.low_since[Role.DECODE],
        decision.flip_to,
    )
    if advise_only:
        following = replace(following, prefill=None, decode=None, flip_to=None)
    loads = (model.now(Role.PREFILL), model.now(Role.DECODE))
    return Plan(desired, decision.flip_to, advise_only, following, loads)


class _Decision:
    """One run of the rules; it lives as long as the call of `plan`."""

    def __init__(
        self,
        model: LoadModel,
        now: float,
        limits: Limits,
        state: PlannerState,
        times: CapacityTimes | None,
        settings: PlannerSettings,
    ) -> None:
        self.model, self.now, self.limits, self.state, self.settings = model, now, limits, state, settings
        self.times = times or CapacityTimes()
        self.base = self._fitting({role: self._last(role) for role in Role})
        self.counts = dict(self.base)
        self.loads = {role: model.at(role, self.base[role]) for role in Role}
        self.needs = {role: self._need(role) for role in Role}
        self.low_since = {role: self._low_since(role) for role in Role}
        self.flip_to: Role | None = None
        self.rebalanced = False

    def take(self) -> None:
        """Apply the rules: first what is short, then what is too much."""
        self._rebalance()
        self._grow()
        for role in Role:
            if self.counts[role] == self.base[role] and self.held(role) >= self._patience(role):
                self._give_up_one(role)
        if self.flip_to is None and self._flip_goes_on():
            self.flip_to = self.state.flip_to

    def why(self) -> tuple[str, str]:
        """Reason and message."""
        more = [role for role in Role if self.counts[role] > self.base[role]]
        fewer = [role for role in Role if self.counts[role] < self.base[role]]
        short = [role for role in Role if self.counts[role] < self.needs[role]]
        return self._reason(more, fewer, short), "; ".join(self._sentence(role) for role in Role)

    def held(self, role: Role) -> float:
        """For how long one instance fewer would have done; -1 when it would not."""
        since = self.low_since[role]
        return -1.0 if since is None else self.now - since

    def _reason(self, more: list[Role], fewer: list[Role], short: list[Role]) -> str:
        if self.rebalanced:
            return "Rebalanced"
        if short:
            at_most = all(self.counts[role] >= self.limits.of(role).max_replicas for role in short)
            return "MaxReplicasReached" if at_most else "BudgetExhausted"
        if more:
            return "ScaledUp"
        if fewer:
            return "ScaledDown"
        strains = [load.strain for load in self.loads.values()]
        if any(strain is not None and strain > self.settings.scale_up_above for strain in strains):
            return "AwaitingCapacity"
        return "LoadUnknown" if None in strains else "Steady"

    def _sentence(self, role: Role) -> str:
        load, base, count = self.loads[role], self.base[role], self.counts[role]
        change = f"{role} stays at {count}" if count == base else f"{role} {base} to {count}"
        if load.load.value is None or load.term is None:
            return f"{change}: load unknown"
        said = f"{change}: load {load.load.value:.2f} with {load.count} ({load.term}, {load.load.source})"
        if count != base:
            after = self.model.at(role, count).load.value
            said += f", forecast {after:.2f} with {count}" if after is not None else ""
        return f"{said}, needs {self.needs[role]}" if self.needs[role] > count else said

    def _last(self, role: Role) -> int:
        last = self.state.count(role)
        if last is None:
            there = (InstanceState.SERVING, InstanceState.STARTING)
            last = sum(instance.state in there for instance in self.model.fleet.of(role))
        return max(self.limits.of(role).clamp(last), self._least(role))

    def _least(self, role: Role) -> int:
        pool = self.limits.of(role)
        return max(pool.min_replicas, min(1, pool.max_replicas))

    def _fitting(self, counts: dict[Role, int]) -> dict[Role, int]:
        """Counts within a budget that may have become smaller; the less loaded pool gives first."""
        while not self.limits.fits(self.limits.gpus(counts[Role.PREFILL], counts[Role.DECODE])):
            able = [role for role in Role if counts[role] > self.limits.of(role).min_replicas]
            giver = min(able, key=lambda role: self.model.at(role, max(1, counts[role] - 1)).strain or 0.0)
            counts[giver] -= 1
        return counts

    def _need(self, role: Role) -> int:
        """The least count whose predicted load is under the aim, as far as one decision may go.

        A measured overload tells how long the queue is, not how many instances end it. Alone it adds a few, and only
        when all that was asked for before serves.
        """
        base, load = self.base[role], self.loads[role]
        if load.strain is None or load.strain <= self.settings.scale_up_above:
            return base
        asked = base if self._awaits(role) else base + self.settings.measured_step
        if load.predicted_strain is None or load.predicted_strain <= self.settings.scale_up_above:
            return asked
        most = max(base + 2, math.floor(base * self.settings.growth_factor))
        for count in range(base + 1, most):
            forecast = self.model.at(role, count).predicted_strain
            if forecast is not None and forecast <= self.settings.aim_below:
                return max(count, asked)
        return most

    def _awaits(self, role: Role) -> bool:
        return self.base[role] > len(self.model.fleet.serving(role))

    def _low_since(self, role: Role) -> float | None:
        if self.base[role] <= self._least(role):
            return None
        fewer, present = self.model.at(role, self.base[role] - 1), self.model.now(role).strain
        if present is not None and present > self.settings.scale_up_above:
            return None
        strain = fewer.strain_of_count
        if not fewer.complete or strain is None or strain > self.settings.scale_down_below:
            return None
        since = self.state.low_since(role)
        return self.now if since is None or since > self.now else since

    def _patience(self, role: Role) -> float:
        return self.settings.cancel_seconds if self._awaits(role) else self.settings.stabilisation_seconds

    def _rebalance(self) -> None:
        """Give one instance of the pool with too much to the one with too little."""
        for role in Role:
            donor = role.other
            short = self.needs[role] > self.base[role] and self.base[role] < self.limits.of(role).max_replicas
            if not short or self.held(donor) < self.settings.rebalance_seconds:
                continue
            flips = self.times.flip_is_cheaper and self.limits.alike and self._has_flippable(donor)
            freed = self.limits.gpus(self.counts[Role.PREFILL], self.counts[Role.DECODE])
            freed += self.limits.of(role).gpus - self.limits.of(donor).gpus
            if (flips or not self._fits_one_more(role)) and self.limits.fits(freed):
                self._give_up_one(donor)
                self.counts[role] += 1
                self.rebalanced = True
                self.flip_to = role if flips else None

    def _give_up_one(self, role: Role) -> None:
        self.counts[role] -= 1
        self.needs[role] = self.counts[role]
        self.low_since[role] = self.now

    def _has_flippable(self, role: Role) -> bool:
        serving = self.model.fleet.serving(role)
        return len(serving) > self._least(role) and any(instance.flippable for instance in serving)

    def _grow(self) -> None:
        """Add one at a time, each to the pool with the higher load, while the budget lasts."""
        while able := [role for role in Role if self.counts[role] < self.needs[role] and self._may_grow(role)]:
            role = max(able, key=lambda each: self.model.at(each, self.counts[each]).strain or 0.0)
            self.counts[role] += 1

    def _may_grow(self, role: Role) -> bool:
        return self.counts[role] < self.limits.of(role).max_replicas and self._fits_one_more(role)

    def _fits_one_more(self, role: Role) -> bool:
        held = self.limits.gpus(self.counts[Role.PREFILL], self.counts[Role.DECODE])
        return self.limits.fits(held + self.limits.of(role).gpus)

    def _flip_goes_on(self) -> bool:
        """Whether the flip that was decided is still wanted and still possible."""
        to = self.state.flip_to
        if to is None:
            return False
        there = (InstanceState.SERVING, InstanceState.STARTING)
        has = sum(instance.state in there for instance in self.model.fleet.of(to))
        leaving = (InstanceState.SERVING, InstanceState.DRAINING)
        donors = [each for each in self.model.fleet.of(to.other) if each.state in leaving]
        return has < self.counts[to] and len(donors) > self.counts[to.other] and any(each.flippable for each in donors)
