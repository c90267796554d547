"""The control loop of one service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Objectives, Role
from kllm_core.steps import DesiredCounts, Start, StepDecision
from kllm_core.timing import PRIOR, EngineTiming
from kllm_operator.fleet.snapshot import Snapshot, snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.crashes import Crashes
from kllm_operator.loop.events import Ended, Event, Failed, Planned, Serving
from kllm_operator.loop.hands import Hands
from kllm_operator.loop.report import Report
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.demand import Demand, Forecast, Stages
from kllm_operator.plan.fit import Fit
from kllm_operator.plan.invariants import UnsafeStepError
from kllm_operator.plan.load import LoadModel
from kllm_operator.plan.members import Goal, Limits
from kllm_operator.plan.planner import Plan, PlannerState, plan
from kllm_operator.plan.reconciler import next_step
from kllm_operator.substrate.base import Substrate

_log = structlog.get_logger(__name__)

_MOST_STEPS = 32
"""In one tick. A tick has far fewer; the bound keeps a fault from turning into a storm."""
_ORDINARY = frozenset({"Steady", "ScaledUp", "ScaledDown", "Rebalanced"})
"""Reasons that follow from one another without anything new to tell: what has scaled is steady a moment later."""
_LOOK_SECONDS = 1.0
"""Least time between two looks at loads that may have crossed 1: agents report that often."""


class Heard(Protocol):
    """What is heard of the service."""

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each report."""

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Follow exactly these agents: host:port by instance."""

    def forecast(self, now: float) -> Forecast:
        """What will arrive."""

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the present capacity took."""


@dataclass(frozen=True)
class Scaled:
    """What is scaled, and within which bounds.

    Attributes:
        advise_only: counts stay at their minimum, whatever the planner would do.
        timing: of the engines, as far as it is known; None: it is learned.
        start_seconds: what a start took before; None is unknown.
    """

    objectives: Objectives
    limits: Limits
    advise_only: bool = False
    timing: EngineTiming | None = None
    start_seconds: float | None = None


class Control:
    """Looks, plans and acts, tick by tick. Belongs to one event loop.

    Args:
        scaled: the service.
        substrate: where its instances live.
        heard: what they and the routers tell.
        tell: hears of every decision; must not wait or raise.
        publish: gets the state of both pools after each tick.
        settings: of the loop and the planner.
        clock: monotonic seconds; that of the event loop if left out.
    """

    def __init__(
        self,
        scaled: Scaled,
        substrate: Substrate,
        heard: Heard,
        *,
        tell: Callable[[Event], None],
        publish: Callable[[Report], None] = lambda _: None,
        settings: LoopSettings | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._scaled, self._substrate, self._heard, self._tell, self._publish = scaled, substrate, heard, tell, publish
        self._settings = settings or LoopSettings()
        self._clock = clock or asyncio.get_running_loop().time
        self._book = CapacityBook(scaled.start_seconds)
        self._crashes = Crashes(self._settings.restarts)
        self._fit = Fit(scaled.timing or PRIOR, exact=scaled.timing is not None)
        self._hands = Hands(
            substrate, book=self._book, tell=self._heard_of, clock=self._clock,
            drain_seconds=self._settings.drain_seconds,
        )  # fmt: skip
        self._state = PlannerState()
        self._plan: Plan | None = None
        self._said: tuple[object, ...] = ()
        self._decided_at = {role: self._clock() for role in Role}
        self._failed: set[str] = set()
        self._served_since: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._urgent = True
        substrate.subscribe(self._hurry)
        heard.subscribe(self._wake.set)

    async def run(self) -> None:
        """Tick until cancelled: in time, when the substrate changes, and when a load crosses 1."""
        try:
            while True:
                try:
                    self._urgent = False
                    await self.tick()
                    await self._until_due()
                except Exception:  # noqa: BLE001  requests are served without the loop: it must not end what serves
                    _log.exception("TickFailed")
                    await asyncio.sleep(self._settings.tick_seconds)
        finally:
            await self._hands.close()

    async def tick(self) -> None:
        """Look, plan, and take the steps that are possible now."""
        now = self._clock()
        seen = await self._look()
        decided = self._decide(seen, now)
        await self._act(decided)
        advised = decided.desired if self._scaled.advise_only else None
        self._publish(Report(self._goal(decided).desired, advised, decided.loads, await self._look(), self._heard.told))

    async def _until_due(self) -> None:
        due = self._clock() + self._settings.tick_seconds
        held = self._crashes.next_seconds(self._clock())
        if held is not None:
            due = min(due, self._clock() + held)
        while not self._urgent and (left := due - self._clock()) > 0:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            if self._wake.is_set() and not self._urgent:
                if await self._crosses():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_SECONDS, max(0.0, due - self._clock()))):
                        await self._hurried()

    async def _hurried(self) -> None:
        while not self._urgent:
            self._wake.clear()
            await self._wake.wait()

    async def _crosses(self) -> bool:
        """Whether a load is above 1 that was not at the last decision."""
        if self._plan is None:
            return True
        model = self._model(await self._look(), self._clock())
        bound = self._settings.planner.scale_up_above
        return any(
            (model.now(before.role).strain or 0.0) > bound >= (before.strain or 0.0) for before in self._plan.loads
        )

    async def _look(self) -> Snapshot:
        now = self._clock()
        observed = await self._substrate.observe()
        self._heard.follow({each.id: each.agent for each in observed if each.agent and not each.ending})
        seen = snapshot(
            observed, self._heard.told, now=now, unflippable=self._hands.unflippable, trust=self._settings.trust
        )
        for arrival in self._book.observe(seen.fleet, now=now):
            self._tell(Serving(arrival))
        serving = (each.id for role in Role for each in seen.fleet.serving(role))
        since = {name: self._served_since.get(name, now) for name in serving}
        for each in seen.observed:
            if each.state is InstanceState.FAILED and not each.ending and each.id not in self._failed:
                self._failed.add(each.id)
                self._book.forget(each.id)
                served = now - self._served_since.pop(each.id, now)
                pause = self._crashes.failed(each.role, now=now, served_seconds=served)
                self._tell(Failed(each.id, each.role, each.message, pause.words))
        self._failed &= {each.id for each in seen.observed}
        self._served_since = since
        return seen

    def _model(self, seen: Snapshot, now: float) -> LoadModel:
        def age(role: Role) -> float | None:
            return self._book.changed_age_seconds(role, now=now)

        stages = self._heard.stages(now, percentile=self._scaled.objectives.percentile, changed_age_seconds=age)
        demand = Demand(self._heard.forecast(now), stages, age(Role.PREFILL), age(Role.DECODE))
        settings = self._settings.load
        if self._book.start_seconds is not None:
            settings = replace(settings, horizon_seconds=max(self._settings.tick_seconds, self._book.start_seconds))
        return LoadModel(self._scaled.objectives, seen.fleet, demand, self._fit.timing, settings)

    def _decide(self, seen: Snapshot, now: float) -> Plan:
        forecast = self._heard.forecast(now)
        self._fit = self._fit.learn(seen.fleet, forecast, fresh_seconds=self._settings.tick_seconds)
        model = self._model(seen, now)
        donor = min(Role, key=lambda role: model.now(role).strain or 0.0)
        times = self._book.times(donor, forecast=forecast, timing=self._fit.timing, fleet=seen.fleet)
        decided = plan(
            model, now=now, limits=self._scaled.limits, state=self._state, times=times,
            settings=self._settings.planner, advise_only=self._scaled.advise_only,
        )  # fmt: skip
        self._say(decided, now)
        self._state, self._plan = decided.state, decided
        return decided

    def _say(self, decided: Plan, now: float) -> None:
        desired, before = decided.desired, None if self._plan is None else self._plan.desired
        for role in Role:
            if before is not None and desired.of(role) > before.of(role):
                self._decided_at[role] = now
        trouble = "" if desired.reason in _ORDINARY else desired.reason
        said = (desired.prefill, desired.decode, trouble, decided.flip_to)
        if said != self._said:
            self._said = said
            self._tell(Planned(before, desired, decided.loads, decided.flip_to, decided.advise_only))

    def _goal(self, decided: Plan) -> Goal:
        limits, desired = self._scaled.limits, decided.desired
        if decided.advise_only:
            least = limits.prefill.min_replicas, limits.decode.min_replicas
            desired = DesiredCounts(*least, "External", "counts are not the planner's to change here")
        return Goal(desired, limits, decided.flip_to, self._crashes.held_back(self._clock()))

    async def _act(self, decided: Plan) -> None:
        for _ in range(_MOST_STEPS):
            seen = await self._look()
            try:
                decision = next_step(self._goal(decided), seen.members)
            except UnsafeStepError as error:
                # What serves goes on serving; the next tick looks again.
                _log.exception("UnsafeStep", error=str(error))
                return
            if decision.step is None:
                return
            role = self._role(decision, seen)
            if not await self._hands.carry_out(decision, role, decided_at=self._asked_at(decision, decided)):
                return

    def _role(self, decision: StepDecision, seen: Snapshot) -> Role:
        if isinstance(decision.step, Start):
            return decision.step.role
        name = "" if decision.step is None else decision.step.instance_id
        return next(each.role for each in seen.members if each.id == name)

    def _asked_at(self, decision: StepDecision, decided: Plan) -> float:
        """When the plan asked for it: a flip is as old as the decision to flip, a replacement as this tick."""
        if decision.reason == "FlipDrained" and decided.flip_to is not None:
            return self._decided_at[decided.flip_to]
        return self._clock()

    def _heard_of(self, event: Event) -> None:
        self._tell(event)
        # What failed is tried again at the next tick, and not at once for ever.
        if isinstance(event, Ended) and not event.error:
            self._hurry()

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.set()
