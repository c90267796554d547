"""What one service shall become: the planner with what it has learned, and what others ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Objectives, Role
from kllm_core.steps import DesiredCounts, StartFrom
from kllm_core.timing import PRIOR, EngineTiming
from kllm_operator.fleet.snapshot import Snapshot
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.looking import Heard
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.bounds import bounded
from kllm_operator.plan.demand import Demand, Forecast, known
from kllm_operator.plan.fit import Fit
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Limits
from kllm_operator.plan.outlook import Course
from kllm_operator.plan.planner import Plan, PlannerState, plan
from kllm_operator.plan.requests import Flips, asked_flips

_COMING = (InstanceState.SERVING, InstanceState.STARTING)


@dataclass(frozen=True)
class Scaled:
    """What is scaled, and within which bounds.

    Attributes:
        advise_only: others write the counts; the planner only says what it would do.
        timing: of the engines, as far as it is known; None: it is learned.
        start_seconds: what a new start took before; None is unknown.
        prior: what learning begins with.
        one_pool: instances of decode compute prompts, too, and prefill has none.
    """

    objectives: Objectives
    limits: Limits
    advise_only: bool = False
    timing: EngineTiming | None = None
    start_seconds: float | None = None
    prior: EngineTiming = PRIOR
    one_pool: bool = False


class Deciding:
    """Remembers what the planner must know from one decision to the next.

    Attributes:
        scaled: the service.
        settings: of the planner.
        last: the last decision.

    Args:
        heard: what is heard of the service.
        book: what changes of capacity took.
    """

    def __init__(self, scaled: Scaled, settings: LoopSettings, *, heard: Heard, book: CapacityBook) -> None:
        self.scaled, self.settings = scaled, settings
        self.last: Plan | None = None
        self._heard, self._book = heard, book
        self._fit = _fit(scaled)
        self._course = Course()
        self._state = PlannerState()

    def change(self, scaled: Scaled, settings: LoopSettings) -> None:
        """Go on with another spec; what was learned stays, unless the engines' timing is told differently."""
        if (scaled.timing, scaled.prior) != (self.scaled.timing, self.scaled.prior):
            self._fit = _fit(scaled)
        self.scaled, self.settings = scaled, settings

    def wakes(self, now: float) -> bool:
        """Whether somebody came to a service that was to have no instance when the last decision was made."""
        if self.last is None or any(self.last.desired.of(role) for role in Role):
            return False
        return bool(known(self._heard.forecast(now).requests_per_second))

    def model(self, seen: Snapshot, now: float) -> LoadModel:
        """What loads follow from."""

        def age(role: Role) -> float | None:
            return self._book.changed_age_seconds(Role.DECODE if self.scaled.one_pool else role, now=now)

        objectives = self.scaled.objectives
        stages = self._heard.stages(now, percentile=objectives.percentile, changed_age_seconds=age)
        forecast = _speculating(self._heard.forecast(now), seen)
        demand = Demand(forecast, stages, age(Role.PREFILL), age(Role.DECODE))
        settings, start = self.settings.load, self._book.start_seconds(_source(seen))
        if start is not None:
            settings = replace(settings, horizon_seconds=max(self.settings.tick_seconds, start))
        ahead, course = self.settings.outlook, self._course.observe(demand.forecast, now)
        lead = settings.horizon_seconds + self.settings.tick_seconds + ahead.lead_margin_seconds
        return LoadModel(
            objectives, seen.fleet, demand, self._fit.timing, settings,
            outlook=course.ahead(lead, ahead.forecast_quantile, ahead.keep_quantile), one_pool=self.scaled.one_pool,
        )  # fmt: skip

    def decide(
        self, seen: Snapshot, now: float, *, limits: Limits, asked: Mapping[Role, int] | None, advise: bool
    ) -> Plan:
        """Both counts.

        Args:
            seen: all instances.
            now: monotonic seconds.
            limits: those of the service, as they are now.
            asked: what the pools ask for: where the planner begins, if it has decided nothing yet.
            advise: what is decided is not carried out.
        """
        forecast = self._heard.forecast(now)
        self._course = self._course.observe(forecast, now)
        ahead = self._course.ahead(0.0, self.settings.outlook.forecast_quantile)
        told = forecast if ahead is None else ahead.by_now(forecast)
        self._fit = self._fit.learn(seen.fleet, told, fresh_seconds=self.settings.tick_seconds)
        model = self.model(seen, now)
        donor = min(Role, key=lambda role: model.now(role).strain or 0.0)
        times = self._book.times(
            donor, source=_source(seen), forecast=forecast, timing=self._fit.timing, fleet=seen.fleet
        )
        decided = plan(
            model, now=now, limits=limits, state=self._begun(asked or {}, seen), times=times,
            settings=self.settings.planner, advise_only=advise,
        )  # fmt: skip
        self._state = decided.state
        return decided

    def flips(self, decided: Plan, seen: Snapshot, limits: Limits) -> tuple[Plan, Flips]:
        """The decision with the flip that a person asks for, and what becomes of others."""
        # What an agent has not told of yet is judged when it has.
        heard = self._heard.told.keys()
        members = [replace(each, requested=each.requested if each.id in heard else None) for each in seen.members]
        flips = asked_flips(decided.desired, decided.flip_to, members, limits, external=self.scaled.advise_only)
        if flips.granted is None:
            return decided, flips
        desired = flips.desired
        state = replace(decided.state, prefill=desired.prefill, decode=desired.decode, flip_to=flips.flip_to)
        self._state = state
        return replace(decided, desired=desired, flip_to=flips.flip_to, state=state), flips

    def from_outside(self, asked: Mapping[Role, int], seen: Snapshot, limits: Limits) -> DesiredCounts:
        """The counts that others ask for, within the limits."""
        members = [each for each in seen.members if not each.ending and not each.is_idle and each.state in _COMING]
        there = {role: sum(each.role is role for each in members) for role in Role}
        return bounded(asked, limits, there=there)

    def _begun(self, asked: Mapping[Role, int], seen: Snapshot) -> PlannerState:
        """What the planner remembers, and what there is to be seen of what another leader's has begun."""
        state = self._state
        draining_to = (each.draining_to for each in seen.observed if each.draining_to and not each.ending)
        return replace(
            state,
            flip_to=state.flip_to or next(draining_to, None),
            prefill=asked.get(Role.PREFILL) if state.prefill is None else state.prefill,
            decode=asked.get(Role.DECODE) if state.decode is None else state.decode,
        )


def _fit(scaled: Scaled) -> Fit:
    return Fit(scaled.timing or scaled.prior, exact=scaled.timing is not None)


def _speculating(forecast: Forecast, seen: Snapshot) -> Forecast:
    """With the tokens that decode yields per step, as far as engines that speculate have told."""
    loads = [each.load for each in seen.fleet.serving(Role.DECODE)]
    told = [length for load in loads if load is not None and (length := known(load.accept_length))]
    return forecast if not told else replace(forecast, accept_length=max(1.0, sum(told) / len(told)))


def _source(seen: Snapshot) -> StartFrom:
    """The way to one more instance that is open now."""
    slots = any(each.state is InstanceState.SLOT and not each.unwanted for each in seen.members)
    return StartFrom.SLOT if slots else StartFrom.NEW
