"""All simulated instances: how they start, drain, flip and end, and what GPU time they take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from kllm.sim.agenda import Agenda
from kllm.sim.fair import FairTurns
from kllm.sim.instances import Instance
from kllm.sim.laws.base import Pool
from kllm.sim.ledger import Ledger
from kllm.sim.scenario import PrefillOrder, Scenario
from kllm_core.engine_model.engine import Engine
from kllm_core.engine_model.spec import Duty
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role

_DUTIES = {Pool.ONE: Duty.BOTH, Pool.PREFILL: Duty.PREFILL, Pool.DECODE: Duty.DECODE}
_QUIET_SECONDS = 0.5
"""That an agent waits before it calls an empty instance drained."""
_STOP_SECONDS = 0.5
"""From the order to end an instance until its GPUs are free."""


class Fleet:
    """Instances by id.

    Attributes:
        instances: all that are not gone.
        alike: an instance of one role can become one of the other.
        ledger: GPU time.
        starts: of instances, those that served from the beginning left out.
        flips: changes of role.
        cancelled: instances that were given up before they served.
        failures: instances that died.

    Args:
        scenario: that is run.
        agenda: of the simulation.
    """

    def __init__(self, scenario: Scenario, agenda: Agenda) -> None:
        self._agenda, self._setups = agenda, scenario.pools
        self._times = scenario.starts
        self._is_fair = scenario.prefill_order is PrefillOrder.FAIR
        self._budget = scenario.gpu_budget
        starts, deaths = np.random.SeedSequence(scenario.seed).spawn(2)
        self._start_draws, self._death_draws = np.random.default_rng(starts), np.random.default_rng(deaths)
        self._death_seconds = math.inf if not scenario.failures.per_hour else 3600 / scenario.failures.per_hour
        self.instances: dict[str, Instance] = {}
        self.ledger = Ledger(self._setups, since=scenario.count_from)
        self.starts = self.flips = self.cancelled = self.failures = 0
        kinds = {(setup.engine, setup.gpus) for setup in self._setups.values()}
        self.alike = len(kinds) == 1 < len(self._setups)
        self._number = {pool: itertools.count() for pool in self._setups}
        self._slots = itertools.count()
        self._on_change: list[Callable[[], None]] = []
        self._on_loss: Callable[[Instance, Engine | None], None] = lambda _instance, _engine: None
        self._on_empty: dict[Instance, Callable[[bool], None]] = {}
        for failure in scenario.failures.scripted:
            agenda.at(failure.at, lambda pool=failure.pool: self._die_one(pool))  # type: ignore[misc]

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each change of an instance's state."""
        self._on_change.append(listener)

    def on_loss(self, listener: Callable[[Instance, Engine | None], None]) -> None:
        """Have a function called when an instance is gone with its requests; it gets the engine that it had."""
        self._on_loss = listener

    # --- what there is

    def of(self, pool: Pool, *states: InstanceState) -> list[Instance]:
        """Instances of a pool in some states; slots are none."""
        there = (each for each in self.instances.values() if each.pool is pool and not each.is_slot)
        return [each for each in there if each.state in states]

    def serving(self, pool: Pool) -> list[Instance]:
        """Instances that take requests."""
        return self.of(pool, InstanceState.SERVING)

    def slots(self, pool: Pool) -> list[Instance]:
        """Slots of a pool, those on their way included."""
        return [each for each in self.instances.values() if each.is_slot and each.pool is pool]

    def fits(self, pool: Pool) -> bool:
        """Whether the budget allows one more instance."""
        return self._budget is None or self.ledger.held + self._setups[pool].gpus <= self._budget

    def pool_of(self, role: Role) -> Pool:
        """The pool whose instances have a role in the planner's eyes."""
        if Pool.ONE in self._setups:
            return Pool.ONE
        return Pool.PREFILL if role is Role.PREFILL else Pool.DECODE

    # --- steps

    def serve_at_once(self, pool: Pool) -> Instance:
        """An instance that serves when the run begins."""
        instance = self._make(f"{pool}-{next(self._number[pool])}", pool, is_slot=False)
        self._serve(instance)
        return instance

    def start(self, pool: Pool) -> Instance:
        """Begin one more instance."""
        self.starts += 1
        instance = self._make(f"{pool}-{next(self._number[pool])}", pool, is_slot=False)
        instance.pending = self._agenda.after(self._drawn(self._times.new), lambda: self._serve(instance))
        self._changed()
        return instance

    def add_slot(self, pool: Pool) -> Instance:
        """Begin one more slot."""
        slot = self._make(f"slot-{next(self._slots)}", pool, is_slot=True)
        slot.pending = self._agenda.after(self._drawn(self._times.prepare), lambda: self._be_slot(slot))
        self._changed()
        return slot

    def start_in(self, slot: Instance, pool: Pool) -> None:
        """Begin an instance in a slot that is ready; one whose server waits at the gate only serves its own pool."""
        self.starts += 1
        seconds = self._times.gate if slot.state is InstanceState.GATED else self._times.slot
        self._move(slot, pool)
        slot.is_slot, slot.state, slot.message = False, InstanceState.STARTING, "starts"
        slot.begun_at = self._agenda.now
        slot.pending = self._agenda.after(self._drawn(seconds or 0.0), lambda: self._serve(slot))
        self._changed()

    def cancel(self, instance: Instance) -> None:
        """Give up what does not serve yet."""
        if not instance.is_slot:
            self.cancelled += 1
        self._gone(instance)

    def drain(self, instance: Instance, *, deadline: float, then: Callable[[bool], None] = lambda _: None) -> None:
        """Let an instance take nothing new.

        Args:
            instance: that serves.
            deadline: seconds.
            then: called once with whether it is empty.
        """
        instance.state, instance.message = InstanceState.DRAINING, "drains"
        self._on_empty[instance] = then
        instance.pending = self._agenda.after(deadline, lambda: self._drained(instance, empty=False))
        self._changed()
        self.check_empty(instance)

    def check_empty(self, instance: Instance) -> None:
        """Notice that a draining instance has nothing left."""
        if instance in self._on_empty and not instance.flights:
            self._agenda.after(_QUIET_SECONDS, lambda: self._drained(instance, empty=True))

    def stop(self, instance: Instance, then: Callable[[], None] = lambda: None) -> None:
        """End an instance, and give its GPUs back a moment later. What it still has is lost."""
        instance.is_ending, instance.message = True, "ends"
        if instance.state is InstanceState.SERVING:
            instance.state = InstanceState.DRAINING
        self._on_empty.pop(instance, None)
        self._lose(instance)

        def end() -> None:
            self._gone(instance)
            then()

        self._forget_pending(instance)
        instance.pending = self._agenda.after(_STOP_SECONDS, end)
        self._changed()

    def flip(self, instance: Instance, pool: Pool, then: Callable[[float], None]) -> None:
        """Let an empty instance serve another pool; its cache is lost.

        Args:
            instance: that is drained.
            pool: that it will serve.
            then: called with the seconds that it took.
        """
        self.flips += 1
        seconds = self._drawn(self._times.switch)
        self._move(instance, pool)
        instance.state, instance.message, instance.is_drained = InstanceState.STARTING, "switches its role", False
        instance.begun_at, instance.becomes = self._agenda.now, None
        instance.incarnation += 1

        def end() -> None:
            self._serve(instance)
            then(seconds)

        self._forget_pending(instance)
        instance.pending = self._agenda.after(seconds, end)
        self._changed()

    # --- inside

    def _make(self, name: str, pool: Pool, *, is_slot: bool) -> Instance:
        instance = Instance(name, pool, now=self._agenda.now, is_slot=is_slot)
        self.instances[name] = instance
        self.ledger.change(pool, self._setups[pool].gpus, self._agenda.now)
        return instance

    def _serve(self, instance: Instance) -> None:
        instance.state, instance.message, instance.pending = InstanceState.SERVING, "serves", None
        spec = self._setups[instance.pool].engine
        instance.engine = Engine(spec, _DUTIES[instance.pool], turns=FairTurns(spec) if self._is_fair else None)
        if self._death_seconds < math.inf:
            # Drawn anew for each engine: an exponential time has no memory.
            incarnation = instance.incarnation
            lives = float(self._death_draws.exponential(self._death_seconds))
            self._agenda.after(lives, lambda: self._die(instance, incarnation))
        self._changed()

    def _be_slot(self, slot: Instance) -> None:
        slot.state = InstanceState.SLOT if self._times.gate is None else InstanceState.GATED
        slot.message, slot.pending = "is ready", None
        self._changed()

    def _drained(self, instance: Instance, *, empty: bool) -> None:
        if empty and instance.flights:
            return
        then = self._on_empty.pop(instance, None)
        if then is None:
            return
        self._forget_pending(instance)
        instance.is_drained, instance.is_overdue = empty, not empty
        self._changed()
        then(empty)

    def _die_one(self, pool: Pool) -> None:
        serving = self.serving(pool)
        if serving:
            self._die(serving[0], serving[0].incarnation)

    def _die(self, instance: Instance, incarnation: int) -> None:
        if self.instances.get(instance.id) is not instance or instance.incarnation != incarnation:
            return
        if instance.state not in {InstanceState.SERVING, InstanceState.DRAINING} or instance.engine is None:
            return
        self.failures += 1
        self._forget_pending(instance)
        instance.state, instance.message = InstanceState.FAILED, "has died"
        then = self._on_empty.pop(instance, None)
        self._lose(instance)
        self._changed()
        if then is not None:
            then(False)

    def _lose(self, instance: Instance) -> None:
        engine, instance.engine = instance.engine, None
        if instance.timer is not None:
            instance.timer.cancel()
            instance.timer = None
        self._on_loss(instance, engine)

    def _gone(self, instance: Instance) -> None:
        self._forget_pending(instance)
        if self.instances.pop(instance.id, None) is not None:
            self.ledger.change(instance.pool, -self._setups[instance.pool].gpus, self._agenda.now)
            self._changed()

    def _move(self, instance: Instance, pool: Pool) -> None:
        if pool is not instance.pool:
            self.ledger.change(instance.pool, -self._setups[instance.pool].gpus, self._agenda.now)
            self.ledger.change(pool, self._setups[pool].gpus, self._agenda.now)
            instance.pool = pool
        instance.engine = None

    def _drawn(self, mean: float) -> float:
        spread = self._times.spread
        if not spread or not mean:
            return mean
        sigma = math.sqrt(math.log1p(spread * spread))
        return float(mean * math.exp(sigma * self._start_draws.standard_normal() - sigma * sigma / 2))

    def _changed(self) -> None:
        for listener in self._on_change:
            listener()

    @staticmethod
    def _forget_pending(instance: Instance) -> None:
        if instance.pending is not None:
            instance.pending.cancel()
            instance.pending = None
