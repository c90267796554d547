"""The rules that counts are decided by. Pure.

Counts are judged at the last decision, so that instances on their way count as capacity and a missing report takes
none away.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.plan.capacity import CapacityTimes
from kllm_operator.plan.demand import known
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits
from kllm_operator.plan.memory import PlannerState, remembered
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.plan.settings import PlannerSettings

_COMING = (InstanceState.SERVING, InstanceState.STARTING)


class Decision:
    """One run of the rules; it lives as long as one call of `plan`.

    Attributes:
        before: what was remembered.
        base: the counts that it begins with.
        counts: those that it comes to.
        short: since when roles have been short; None: they are not.
        needs: the least counts that demand ahead asks for.
        flip_to: the role that gets an instance of the other one.
    """

    def __init__(
        self,
        model: LoadModel,
        now: float,
        limits: Limits,
        state: PlannerState,
        times: CapacityTimes,
        settings: PlannerSettings,
    ) -> None:
        self.model, self.now, self.limits, self.settings = model, now, limits, settings
        self.times, self.before = times, state
        self._judged: dict[tuple[Role, int, bool, float], RoleLoad] = {}
        self.idle_since = self._idle_since()
        self.base = self._fitting({role: self._last(role) for role in Role})
        self.counts = dict(self.base)
        self.short = {role: self._short(role) for role in Role}
        self.needs = {role: self._need(role) for role in Role}
        self.low = {role: self._low(role) for role in Role}
        self.flip_to: Role | None = None
        self.rebalanced = False

    def take(self) -> None:
        """Apply the rules: first what is short, then what is too much."""
        if self.sleeps:
            for role in Role:
                self._give_up(role, self.counts[role])
            return
        self._rebalance()
        self._grow()
        for role in Role:
            if self.counts[role] == self.base[role]:
                self._give_up(role, self._spared(role))
        if self.flip_to is None and self._flip_goes_on():
            self.flip_to = self.before.flip_to

    def state(self, *, advise_only: bool) -> PlannerState:
        """What the next decision must know; advice is not carried out, and so leaves no counts."""
        following = PlannerState(
            self.counts[Role.PREFILL],
            self.counts[Role.DECODE],
            tuple(self.low[Role.PREFILL].items()),
            tuple(self.low[Role.DECODE].items()),
            self.flip_to,
            self._grown(Role.PREFILL),
            self._grown(Role.DECODE),
            self.idle_since,
            remembered(self.before.past, self.now, self._level, seconds=self.lead_seconds),
            self.short[Role.PREFILL],
            self.short[Role.DECODE],
        )
        return replace(following, prefill=None, decode=None, flip_to=None) if advise_only else following

    def at(self, role: Role, count: int, *, lasting: bool = False, spare: float = 0.0) -> RoleLoad:
        """Forecast load, judged once."""
        key = (role, max(1, count), lasting, spare)
        if key not in self._judged:
            self._judged[key] = self.model.at(role, count, lasting=lasting, spare=spare)
        return self._judged[key]

    # --- where it begins

    @property
    def _rate(self) -> float | None:
        return known(self.model.demand.forecast.requests_per_second)

    @property
    def _level(self) -> float | None:
        return self._rate if self.model.outlook is None else self.model.outlook.level

    @property
    def start_seconds(self) -> float:
        """That a start takes."""
        return known(self.times.start_seconds) or self.model.settings.horizon_seconds

    @property
    def lead_seconds(self) -> float:
        """From a decision until it helps."""
        return self.start_seconds if self.model.outlook is None else max(self.start_seconds, self.model.outlook.seconds)

    @property
    def _may_sleep(self) -> bool:
        return all(self.limits.of(role).min_replicas == 0 for role in Role)

    @property
    def sleeps(self) -> bool:
        """Whether there shall be no instance at all."""
        idle = self.idle_since is not None and self.now - self.idle_since >= self.settings.zero_after_seconds
        return self._may_sleep and idle

    def _idle_since(self) -> float | None:
        """Since when nothing comes and nothing is there to be done, as far as all have told."""
        loads = [each.load for role in Role for each in self.model.fleet.serving(role)]
        busy = any(load is None or load.running_requests or load.queued_requests for load in loads)
        silent = not all(self.model.now(role).complete for role in Role if self.model.fleet.serving(role))
        if self._rate != 0 or not self.model.demand.forecast.complete or busy or silent:
            return None
        since = self.before.idle_since
        return self.now if since is None or since > self.now else since

    def _last(self, role: Role) -> int:
        last = self.before.count(role)
        if last is None:
            last = sum(instance.state in _COMING for instance in self.model.fleet.of(role))
        return max(self.limits.of(role).clamp(last), self._least(role))

    def _least(self, role: Role) -> int:
        """One of each role serves while anyone may come; none is needed where nobody has for long."""
        pool = self.limits.of(role)
        asleep = self._may_sleep and self.before.count(role) == 0 and not self._rate
        return max(pool.min_replicas, 0 if asleep or self.sleeps else min(1, pool.max_replicas))

    def _fitting(self, counts: dict[Role, int]) -> dict[Role, int]:
        """Counts within a budget that may have become smaller; the less loaded pool gives first."""
        while not self.limits.fits(self.limits.gpus(counts[Role.PREFILL], counts[Role.DECODE])):
            able = [role for role in Role if counts[role] > self.limits.of(role).min_replicas]
            giver = min(able, key=lambda role: self.at(role, max(1, counts[role] - 1)).strain or 0.0)
            counts[giver] -= 1
        return counts

    # --- what is short, and what is too much

    def _need(self, role: Role) -> int:
        """The least count whose predicted load is under the aim, as far as one decision may go.

        A measured overload tells how long the queue is, not how many instances end it. Alone it adds a few, and only
        when all that was asked for before serves.
        """
        base, load = self.base[role], self.at(role, self.base[role])
        if load.strain is None or not self._must_grow(role, load.strain) or not self.limits.of(role).max_replicas:
            return base
        asked = base if self.awaited(role) else base + self.settings.measured_step
        if load.predicted_strain is None or load.predicted_strain <= self.settings.scale_up_above:
            return asked
        grown = self._growth_from(role)
        most = max(grown + 2, math.floor(grown * self.settings.growth_factor), base)
        if most == base:
            return base
        for count in range(base + 1, most):
            forecast = self.at(role, count).predicted_strain
            if forecast is not None and forecast <= self.settings.aim_below:
                return max(count, asked)
        return most

    def _short(self, role: Role) -> float | None:
        """Since when the role has been short."""
        strain, since = self.at(role, self.base[role]).strain, self.before.short(role)
        if strain is None or strain <= self.settings.scale_up_above:
            return None
        return self.now if since is None else min(since, self.now)

    def _must_grow(self, role: Role, strain: float) -> bool:
        since, patience = self.short[role], self.settings.growth_starts * self.start_seconds
        return since is not None and (strain > self.settings.urgent_above or self.now - since >= patience)

    def _growth_from(self, role: Role) -> int:
        """The count that growth is bounded by: what it was before it has grown, as long as that is new."""
        grown = self.before.grown(role)
        if grown is None or not 0 <= self.now - grown[0] < self.settings.growth_seconds:
            return self.base[role]
        return min(grown[1], self.base[role])

    def _grown(self, role: Role) -> tuple[float, int] | None:
        if self.counts[role] <= self.base[role]:
            return self.before.grown(role)
        return self.now, self._growth_from(role)

    def awaited(self, role: Role) -> int:
        """Instances that were asked for and do not serve yet."""
        return max(0, self.base[role] - len(self.model.fleet.serving(role)))

    def _low(self, role: Role) -> dict[int, float]:
        """Lower counts that would do for as long as it would take to get back what goes, and since when they would."""
        base, before = self.base[role], self.before.low(role)
        present = self.model.now(role).strain
        if present is not None and present > self.settings.scale_up_above:
            return {}
        least = max(self._least(role), math.floor(base / self.settings.growth_factor))
        low: dict[int, float] = {}
        for count in range(base - 1, least - 1, -1):
            if not self._would_do(role, count):
                break
            since = before.get(count, self.now)
            low[count] = min(since, self.now)
        return low

    def _would_do(self, role: Role, count: int) -> bool:
        bounds = {0.0: self.settings.scale_down_below, self.settings.spare: self.settings.scale_up_above}
        for spare, bound in bounds.items():
            load = self.at(role, count, lasting=True, spare=spare)
            strain = load.strain_of_count
            if not load.complete or strain is None or strain > bound:
                return False
        return True

    def patience(self, role: Role, fewer: int = 1) -> float:
        """For how long so many fewer must have been enough; those that do not serve yet go first and sooner."""
        if fewer <= self.awaited(role):
            return self.settings.cancel_seconds
        return max(self.settings.stabilisation_seconds, self.settings.stabilisation_starts * self.start_seconds)

    def held(self, role: Role, fewer: int = 1) -> float:
        """For how long so many fewer would have done; -1 when they would not."""
        since = self.low[role].get(self.base[role] - fewer)
        return -1.0 if since is None else self.now - since

    def _spared(self, role: Role) -> int:
        """How many may go now."""
        able = [n for n in range(1, len(self.low[role]) + 1) if self.held(role, n) >= self.patience(role, n)]
        return max(able, default=0)

    # --- what changes

    def _give_up(self, role: Role, fewer: int) -> None:
        if fewer:
            self.counts[role] -= fewer
            self.needs[role] = self.counts[role]
            self.low[role] = {}

    def _grow(self) -> None:
        """Add one at a time, each to the pool with the higher load, while the budget lasts."""
        while able := [role for role in Role if self.counts[role] < self.needs[role] and self._may_grow(role)]:
            role = max(able, key=lambda each: self.at(each, self.counts[each]).strain or 0.0)
            self.counts[role] += 1

    def _may_grow(self, role: Role) -> bool:
        return self.counts[role] < self.limits.of(role).max_replicas and self._fits_one_more(role)

    def _fits_one_more(self, role: Role) -> bool:
        held = self.limits.gpus(self.counts[Role.PREFILL], self.counts[Role.DECODE])
        return self.limits.fits(held + self.limits.of(role).gpus)

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
                self._give_up(donor, 1)
                self.counts[role] += 1
                self.rebalanced = True
                self.flip_to = role if flips else None

    def _has_flippable(self, role: Role) -> bool:
        serving = self.model.fleet.serving(role)
        return len(serving) > self._least(role) and any(instance.flippable for instance in serving)

    def _flip_goes_on(self) -> bool:
        """Whether the flip that was decided is still wanted and still possible."""
        to = self.before.flip_to
        if to is None:
            return False
        has = sum(instance.state in _COMING for instance in self.model.fleet.of(to))
        leaving = (InstanceState.SERVING, InstanceState.DRAINING)
        donors = [each for each in self.model.fleet.of(to.other) if each.state in leaving]
        return has < self.counts[to] and len(donors) > self.counts[to.other] and any(each.flippable for each in donors)
