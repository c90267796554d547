"""The control loop of one service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts, Prepare, Request, Start, StepDecision
from kllm_operator.fleet.snapshot import Snapshot
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.counts import Counts, CountsError, MemoryCounts
from kllm_operator.loop.crashes import Crashes, StoppedRollout
from kllm_operator.loop.deciding import Deciding, Scaled
from kllm_operator.loop.events import CountsNotWritten, Ended, Event, Planned, Requested, Rollout
from kllm_operator.loop.hands import Hands
from kllm_operator.loop.looking import Heard, Looking
from kllm_operator.loop.report import PoolReport, Report, limited
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.invariants import UnsafeStepError
from kllm_operator.plan.members import Goal, Limits
from kllm_operator.plan.planner import Plan
from kllm_operator.plan.reconciler import next_step
from kllm_operator.plan.requests import Flips
from kllm_operator.plan.rollout import stopped_roles
from kllm_operator.substrate.base import Substrate
from kllm_operator.substrate.exceptions import SubstrateError

__all__ = ["Control", "Heard", "Scaled"]

_log = structlog.get_logger(__name__)

_MOST_STEPS = 32
"""In one tick. A tick has far fewer; the bound keeps a fault from turning into a storm."""
_ORDINARY = frozenset({"Steady", "ScaledUp", "ScaledDown", "Rebalanced"})
"""Reasons that follow from one another without anything new to tell: what has scaled is steady a moment later."""
_LOOK_SECONDS = 1.0
"""Least time between two looks at loads that may have crossed 1: agents report that often."""


async def _at_once() -> None:
    """No turn to wait for."""


class Control:
    """Looks, plans and acts, tick by tick. Belongs to one event loop.

    Args:
        scaled: the service.
        substrate: where its instances live.
        heard: what they and the routers tell.
        tell: hears of every decision; must not wait or raise.
        publish: gets the state of both pools after each tick.
        settings: of the loop and the planner.
        counts: where the desired counts are kept; in memory if left out.
        stopped: rollouts that were stopped before this loop began, and are as long as their revision is to be made.
        clock: monotonic seconds; that of the event loop if left out.
        turn: waited for before each tick, so that many loops of one process do not tick at once.
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
        counts: Counts | None = None,
        stopped: Mapping[Role, StoppedRollout] | None = None,
        clock: Callable[[], float] | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._substrate, self._heard, self._tell, self._publish = substrate, heard, tell, publish
        self._settings = settings or LoopSettings()
        self._counts = counts or MemoryCounts()
        self._clock = clock or asyncio.get_running_loop().time
        self._turn = turn or _at_once
        self._book = CapacityBook(scaled.start_seconds)
        self._crashes = Crashes(self._settings.restarts)
        for role, rollout in (stopped or {}).items():
            self._crashes.recall(role, rollout)
        self._deciding = Deciding(scaled, self._settings, heard=heard, book=self._book)
        self._looking = Looking(
            substrate, heard, book=self._book, crashes=self._crashes, tell=tell, clock=self._clock,
            trust=self._settings.trust,
        )  # fmt: skip
        self._hands = Hands(
            substrate, book=self._book, tell=self._heard_of, clock=self._clock,
            drain_seconds=self._settings.drain_seconds,
        )  # fmt: skip
        self._paused = False
        self._said: tuple[object, ...] = ()
        self._answered: dict[str, tuple[Request, bool]] = {}
        self._stopped = frozenset(stopped or ())
        self._unwritten = ""
        self._began_at: float | None = None
        self._decided_at = {role: self._clock() for role in Role}
        self._wake, self._urgent = asyncio.Event(), asyncio.Event()
        substrate.subscribe(self.hurry)
        heard.subscribe(self._wake.set)

    def change(self, scaled: Scaled, settings: LoopSettings | None = None) -> None:
        """Go on with another spec, at once; what was learned of engines and of starts stays.

        Args:
            scaled: the service.
            settings: of the loop and the planner; as they are if left out.
        """
        self._settings = settings or self._settings
        self._deciding.change(scaled, self._settings)
        self._crashes.settings = self._settings.restarts
        self._looking.trust = self._settings.trust
        self._hands.drain_seconds = self._settings.drain_seconds
        self.hurry()

    def pause(self, paused: bool) -> None:
        """Take no step while paused, but look, plan as advice, and report. What was begun goes on.

        Whoever ends a pause has seen to the service: failures in a row are forgotten, so that a rollout that was
        stopped by them is tried again.
        """
        if paused is not self._paused:
            self._paused = paused
            if not paused:
                self._crashes.forget()
            self.hurry()

    def hurry(self) -> None:
        """Decide at once: something that the loop cannot hear has changed, such as counts from outside."""
        self._urgent.set()
        self._wake.set()

    @property
    def ticking_seconds(self) -> float:
        """For how long the present tick lasts; 0 between two."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    async def run(self) -> None:
        """Tick until cancelled: in time, when the substrate changes, and when a load crosses 1."""
        try:
            while True:
                try:
                    await self._turn()
                    self._urgent.clear()
                    await self.tick()
                    await self._until_due()
                except Exception:  # noqa: BLE001  requests are served without the loop: it must not end what serves
                    _log.exception("TickFailed")
                    await asyncio.sleep(self._settings.tick_seconds)
        finally:
            await self._hands.close()

    async def tick(self) -> None:
        """Look, plan, and take the steps that are possible now."""
        self._began_at = self._clock()
        try:
            await self._tick(self._began_at)
        finally:
            self._began_at = None

    async def _tick(self, now: float) -> None:
        seen = await self._look()
        limits, asked = self._limits(), self._counts.read()
        decided, flips = self._decide(seen, now, limits=limits, asked=asked)
        desired = await self._settle(decided, seen, limits, asked)
        wanted = Goal(desired, limits, None if decided.advise_only else decided.flip_to)
        await self._answer(flips, seen)
        idle, seen = await self._act(wanted)
        stopped = stopped_roles(self._now(wanted), seen.members)
        self._say_stopped(stopped)
        held = self._crashes.held_back(self._clock())
        self._publish(
            Report(
                desired, decided.desired if decided.advise_only else None, decided.loads, seen, self._heard.told,
                paused=self._paused, idle=idle, limited=limited(desired, idle),
                pools={
                    role: PoolReport.of(
                        role, seen, desired=desired.of(role), slots_wanted=limits.of(role).slots,
                        held_back=held.get(role), stopped=stopped.get(role),
                        last_failure=self._crashes.last.get(role), trouble=self._hands.troubles.get(role),
                        last_start=self._looking.last_start(role, seen),
                    )
                    for role in Role
                },
                requests=self._waiting(flips, seen, idle), why=decided.why,
            )
        )  # fmt: skip

    async def _until_due(self) -> None:
        due = self._clock() + self._settings.tick_seconds
        held = self._crashes.next_seconds(self._clock())
        if held is not None:
            due = min(due, self._clock() + held)
        while not self._urgent.is_set() and (left := due - self._clock()) > 0:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            if self._wake.is_set() and not self._urgent.is_set():
                if self._crosses():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_SECONDS, max(0.0, due - self._clock()))):
                        await self._urgent.wait()

    def _crosses(self) -> bool:
        """Whether a load is above 1 that was not at the last decision, or a service at zero has got something to do.

        Changes of instances hurry the loop anyway.
        """
        last = self._deciding.last
        if last is None or self._deciding.wakes(self._clock()):
            return True
        model = self._deciding.model(self._looking.listen(unflippable=self._hands.unflippable), self._clock())
        bound = self._settings.planner.scale_up_above
        return any((model.now(before.role).strain or 0.0) > bound >= (before.strain or 0.0) for before in last.loads)

    async def _look(self) -> Snapshot:
        return await self._looking.look(unflippable=self._hands.unflippable)

    def _limits(self) -> Limits:
        """The service's limits, with what the substrate says of its pods."""
        same = self._substrate.revision(Role.PREFILL) == self._substrate.revision(Role.DECODE)
        return replace(self._deciding.scaled.limits, interchangeable=same)

    def _decide(
        self, seen: Snapshot, now: float, *, limits: Limits, asked: Mapping[Role, int] | None
    ) -> tuple[Plan, Flips]:
        before, advise = self._deciding.last, self._paused or self._deciding.scaled.advise_only
        decided = self._deciding.decide(seen, now, limits=limits, asked=asked, advise=advise)
        flips = Flips(decided.desired, decided.flip_to)
        if not self._paused:
            decided, flips = self._deciding.flips(decided, seen, limits)
        self._deciding.last = decided
        self._say(decided, before, now)
        return decided, flips

    def _say(self, decided: Plan, last: Plan | None, now: float) -> None:
        desired, before = decided.desired, None if last is None else last.desired
        for role in Role:
            if before is not None and desired.of(role) > before.of(role):
                self._decided_at[role] = now
        trouble = "" if desired.reason in _ORDINARY else desired.reason
        said = (desired.prefill, desired.decode, trouble, decided.flip_to)
        if said != self._said:
            self._said = said
            self._tell(Planned(before, desired, decided.loads, decided.flip_to, decided.advise_only, decided.why))

    async def _settle(
        self, decided: Plan, seen: Snapshot, limits: Limits, asked: Mapping[Role, int] | None
    ) -> DesiredCounts:
        """The counts to carry out: those decided, once they are written, or those that others ask for."""
        desired = decided.desired
        if decided.advise_only:
            return self._deciding.from_outside(asked or {}, seen, limits)
        if asked is not None and all(asked.get(role) == desired.of(role) for role in Role):
            self._unwritten = ""
            return desired
        try:
            await self._counts.write(desired)
        except CountsError as error:
            if str(error) != self._unwritten:
                self._unwritten = str(error)
                self._tell(CountsNotWritten(desired, str(error)))
            stand = self._deciding.from_outside(self._counts.read() or {}, seen, limits)
            return replace(stand, reason="CountsNotWritten", message=str(error))
        self._unwritten = ""
        return desired

    def _now(self, goal: Goal) -> Goal:
        """The goal with what may start at this moment."""
        held_back = frozenset(self._crashes.held_back(self._clock()))
        return replace(goal, held_back=held_back, failing=self._crashes.failing)

    async def _act(self, wanted: Goal) -> tuple[StepDecision, Snapshot]:
        """Take steps until none is left to be taken; the last decision, and all instances as they are then.

        A role in which nothing can be started starts nothing more in this tick, and the other one does not wait for it.
        In place of the last decision the first start is returned that was impossible.
        """
        if self._paused:
            return StepDecision(None, "Paused", "no step is taken"), await self._look()
        decision = StepDecision(None, "Unsafe", "the rules would break a promise")
        impossible: StepDecision | None = None
        self._hands.troubles.clear()
        for _ in range(_MOST_STEPS):
            seen, goal = await self._look(), self._now(wanted)
            goal = replace(goal, held_back=goal.held_back | self._hands.troubles.keys())
            try:
                decision = next_step(goal, seen.members)
            except UnsafeStepError as error:
                # What serves goes on serving; the next tick looks again.
                _log.exception("UnsafeStep", error=str(error))
                return decision, seen
            if decision.step is None or self._paused:
                return impossible or decision, seen
            role = self._role(decision, seen)
            if not await self._hands.carry_out(decision, role, decided_at=self._asked_at(decision, wanted)):
                if not isinstance(decision.step, Start | Prepare):
                    break
                impossible = impossible or decision
        return impossible or decision, await self._look()

    def _role(self, decision: StepDecision, seen: Snapshot) -> Role:
        if isinstance(decision.step, Start | Prepare):
            return decision.step.role
        name = "" if decision.step is None else decision.step.instance_id
        return next(each.role for each in seen.members if each.id == name)

    def _asked_at(self, decision: StepDecision, wanted: Goal) -> float:
        """When the plan asked for it: a flip is as old as the decision to flip, a replacement as this tick."""
        if decision.reason == "FlipDrained" and wanted.flip_to is not None:
            return self._decided_at[wanted.flip_to]
        return self._clock()

    async def _answer(self, flips: Flips, seen: Snapshot) -> None:
        """Tell once what becomes of each thing that a person asks for."""
        asked = {each.id: each.requested for each in seen.members if each.requested is not None and not each.ending}
        self._answered = {name: answer for name, answer in self._answered.items() if asked.get(name) is answer[0]}
        if self._paused:
            return
        for name, request in asked.items():
            why = flips.refused.get(name)
            accepted = why is None and (request is Request.DRAIN or name == flips.granted)
            if (why is not None or accepted) and self._answered.get(name) != (request, accepted):
                self._answered[name] = (request, accepted)
                self._tell(Requested(name, request, accepted, why or "as soon as it is safe"))
            if why is not None:
                try:
                    await self._substrate.dismiss(name)
                except SubstrateError as error:
                    _log.warning("RequestNotDismissed", instance=name, error=str(error))

    def _waiting(self, flips: Flips, seen: Snapshot, idle: StepDecision) -> Mapping[str, str]:
        """Why what people asked for is not done yet, by instance."""
        asked = [each for each in seen.members if each.requested is not None and not each.ending]
        if self._paused:
            return {each.id: "the service is paused" for each in asked}
        drains = [each.id for each in asked if each.requested is Request.DRAIN and each.state is InstanceState.SERVING]
        return {**flips.waiting, **dict.fromkeys(drains, f"{idle.reason}: {idle.message}")}

    def _say_stopped(self, stopped: Mapping[Role, str]) -> None:
        for role in stopped.keys() - self._stopped:
            self._tell(Rollout(role, "RolloutStopped", stopped[role]))
        self._stopped = frozenset(stopped)

    def _heard_of(self, event: Event) -> None:
        self._tell(event)
        # What failed is tried again at the next tick, and not at once for ever.
        if isinstance(event, Ended) and not event.error:
            self.hurry()
