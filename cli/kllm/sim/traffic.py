"""Requests on their way: arrival, prefill, the choice of decode, transfer, decode, and what goes wrong in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from kllm.bench.plan import Planned
from kllm.bench.row import Status
from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm.sim.laws.base import Pool
from kllm.sim.links import Links
from kllm.sim.routing import Chooser
from kllm.sim.scenario import Scenario
from kllm.sim.waiting import WaitingRoom
from kllm_core.engine_model.engine import Engine
from kllm_core.engine_model.job import Happening, Job, Kind, Phase
from kllm_core.objectives import Binding
from kllm_router.scheduling.choices import Refusal, Refused


class Listener(Protocol):
    """Hears of requests."""

    def arrived(self, flight: Flight) -> None:
        """One has come."""

    def showed(self, flight: Flight) -> None:
        """Its first token comes, within the length of a step."""

    def ended(self, flight: Flight) -> None:
        """One has ended, however it did."""


class Traffic:
    """All requests of a run.

    Attributes:
        flights: all that have arrived, in that order.
        open: those that are not at an end.
        waiting: those that no instance could take, by the pool that they wait for.
        retracted: times that an engine took KV from a running request.
        moved: times that a request went on elsewhere.

    Args:
        scenario: that is run.
        agenda: of the simulation.
        fleet: of instances.
        done: called when all requests have arrived and ended.
    """

    def __init__(self, scenario: Scenario, agenda: Agenda, fleet: Fleet, *, done: Callable[[], None]) -> None:
        self._agenda, self._fleet, self._done = agenda, fleet, done
        self._setup = scenario.router
        self._count_from = scenario.count_from
        self._load: Sequence[Planned] = scenario.load
        self._is_one = Pool.ONE in scenario.pools
        self._is_early = scenario.router.binding is Binding.EARLY
        self._is_just_in_time = scenario.router.binding is Binding.JUST_IN_TIME and not self._is_one
        self._first_pool = Pool.ONE if self._is_one else Pool.PREFILL
        self._block_tokens = scenario.pools[self._first_pool].engine.block_tokens
        self._least_kv = min(setup.engine.kv_tokens for setup in scenario.pools.values())
        self._chooser = Chooser(scenario.router.routing, admission=scenario.router.admission)
        self._links = Links(agenda, scenario.link)
        self._listeners: list[Listener] = []
        self.flights: list[Flight] = []
        self.open: dict[Flight, None] = {}
        self.waiting = {
            pool: WaitingRoom(
                agenda,
                self._setup.park_seconds if pool is Pool.DECODE else self._setup.wait_seconds,
                partial(
                    self._end, status=Status.FAILED if pool is Pool.DECODE else Status.REJECTED, error="NoneServing"
                ),
            )
            for pool in scenario.pools
        }
        self.retracted = self.moved = 0
        fleet.subscribe(self._place_waiting)
        fleet.on_loss(self._lost)
        agenda.at(self._load[0].at, self._arrive)

    def subscribe(self, listener: Listener) -> None:
        """Tell it of requests."""
        self._listeners.append(listener)

    @property
    def has_more(self) -> bool:
        """Whether further requests will arrive."""
        return len(self.flights) < len(self._load)

    def give_up(self) -> None:
        """The run is over: what is open is unfinished."""
        for flight in self.open:
            if flight.first_at is not None and flight.first_at > self._agenda.now:
                flight.first_at = None

    # --- arrival

    def _arrive(self) -> None:
        planned = self._load[len(self.flights)]
        flight = Flight(
            planned.index, planned.at, planned.input_tokens, planned.output_tokens,
            planned.blocks[: planned.input_tokens // self._block_tokens], planned.at >= self._count_from,
            key=planned.key,
        )  # fmt: skip
        self.flights.append(flight)
        self.open[flight] = None
        for listener in self._listeners:
            listener.arrived(flight)
        if self.has_more:
            self._agenda.at(self._load[len(self.flights)].at, self._arrive)
        if flight.input_tokens + flight.output_tokens > self._least_kv:
            self._end(flight, status=Status.REJECTED, error="RequestTooLarge")
        else:
            self._begin(flight, is_new=True)

    def _begin(self, flight: Flight, *, is_new: bool) -> None:
        """Choose where the prompt is computed, and with early binding also where it generates."""
        decode = None if self._is_one else self._fleet.serving(Pool.DECODE)
        chosen = self._chooser.prefill(
            flight, self._fleet.serving(self._first_pool), decode if is_new else None,
            in_flight=len(self.open), now=self._agenda.now,
        )  # fmt: skip
        if isinstance(chosen, Refusal):
            if chosen.reason is Refused.NONE_SERVING:
                self.waiting[self._first_pool].enter(flight)
            else:
                self._end(flight, status=Status.REJECTED, error=chosen.reason.value)
            return
        self.waiting[self._first_pool].leave(flight)
        flight.prefill = chosen
        chosen.send(flight, self._chooser.uncached(flight, chosen))
        if self._is_early and not self._is_one:
            self._bind(flight)
        else:
            self._compute(flight)

    def _compute(self, flight: Flight) -> None:
        if flight.prefill is None:
            return
        flight.prompt = Job(flight, flight.prompt_tokens, flight.left, flight.blocks, phase=Phase.GONE)
        self._after_hop(partial(self._reach, flight.prefill, flight.prompt))
        after = self._chooser.bind_after(flight) if self._is_just_in_time else None
        if after is not None:
            self._agenda.after(after, partial(self._hear_of, flight, flight.prompt))

    def _after_hop(self, call: Callable[[], None]) -> None:
        """A message goes from the router to an engine, or back."""
        if self._setup.hop_seconds:
            self._agenda.after(self._setup.hop_seconds, call)
        else:
            call()

    def _reach(self, instance: Instance, job: Job) -> None:
        """A job comes to its engine, unless its request has left meanwhile."""
        flight = cast("Flight", job.tag)
        if job is flight.prompt or job is flight.answer:
            instance.working.submit(job)
            self.poke(instance)

    def _place_waiting(self) -> None:
        for pool, waiting in self.waiting.items():
            for flight in waiting if self._fleet.serving(pool) else ():
                if pool is self._first_pool:
                    self._begin(flight, is_new=False)
                else:
                    self._bind(flight)

    # --- what engines tell

    def poke(self, instance: Instance) -> None:
        """An engine was given something, or its time has come."""
        engine = instance.engine
        if engine is None:
            return
        for happening in engine.advance(self._agenda.now):
            self._on(instance, happening)
        if instance.engine is engine:
            self._wake(instance)

    def _wake(self, instance: Instance) -> None:
        moment = None if instance.engine is None else instance.engine.next_at
        if instance.timer is not None:
            instance.timer.cancel()
        instance.timer = None if moment is None else self._agenda.at(moment, partial(self.poke, instance))

    def _on(self, instance: Instance, happening: Happening) -> None:
        kind, job, at = happening
        flight = cast("Flight", job.tag)
        if kind is Kind.PREFILLED:
            self._prefilled(flight, job, at)
        elif kind is Kind.ADMITTED:
            self._admitted(flight, job)
        elif kind is Kind.FIRST:
            self._show(flight, at)
        elif kind is Kind.RETRACTED:
            self.retracted += 1
        else:
            self._finished(flight, instance, at)

    def _prefilled(self, flight: Flight, job: Job, at: float) -> None:
        if flight.parked_at is None:
            flight.parked_at = at + self._setup.hop_seconds
            flight.prefill_seconds = at - (at if job.began_at is None else job.began_at)
            flight.cached_tokens = job.cached_tokens
            self._chooser.prefilled(flight, flight.prefill_seconds, job.cached_tokens, now=self._agenda.now)
        if self._is_one:
            self._show(flight, at)
        elif flight.answer is None:
            self._after_hop(partial(self._hear_of, flight, job))
        elif flight.answer.phase is Phase.ARRIVING:
            self._bound(flight)
            self._transfer(flight, wait=0.0)

    def _hear_of(self, flight: Flight, job: Job) -> None:
        """The router hears that a prompt is computed, or expects it soon."""
        if flight.prompt is job and flight.answer is None:
            self._bind(flight)

    def _show(self, flight: Flight, at: float) -> None:
        """Its first token comes; not for one that goes on after it had one."""
        hop = self._setup.hop_seconds
        if flight.first_at is None or flight.first_at > self._agenda.now + hop:
            flight.first_at = at + hop
            for listener in self._listeners:
                listener.showed(flight)

    def _bind(self, flight: Flight) -> None:
        """Choose where it generates."""
        chosen = self._chooser.decode(flight, self._fleet.serving(Pool.DECODE), now=self._agenda.now)
        if isinstance(chosen, Refusal):
            self.waiting[Pool.DECODE].enter(flight)
            return
        self.waiting[Pool.DECODE].leave(flight)
        if flight.bound_at is None:
            flight.bound_at = self._agenda.now
        flight.decode = chosen
        chosen.send(flight, flight.prompt_tokens)
        self._bound(flight)
        flight.answer = Job(flight, flight.prompt_tokens, flight.left, brought=1, phase=Phase.GONE)
        self._after_hop(partial(self._reach, chosen, flight.answer))

    def _bound(self, flight: Flight) -> None:
        """Its KV is parked no more, since decode will take it."""
        if flight.prefill is not None and flight.prompt is not None:
            flight.prefill.working.bind(flight.prompt)
            self.poke(flight.prefill)

    def _admitted(self, flight: Flight, job: Job) -> None:
        has_lost = flight.prefill is not None and flight.prefill.engine is None
        # One whose prefill instance has just died is about to begin anew.
        if flight.answer is not job or has_lost:
            return
        if flight.prompt is None and flight.prefill is not None:
            self._compute(flight)
        elif flight.prompt is None or flight.prompt.phase in {Phase.PARKED, Phase.LEAVING}:
            now = self._agenda.now
            wait = 0.0 if flight.prefill is None else flight.prefill.working.step_rest_seconds(now)
            self._transfer(flight, wait=wait)

    def _transfer(self, flight: Flight, *, wait: float) -> None:
        """Move the KV; that of a retracted request comes back from its instance's own host memory.

        Args:
            flight: whose it is.
            wait: seconds until its instance sends it: one that was asked for it in a step sends it after that.
        """
        if flight.decode is None or flight.answer is None:
            return
        ends = (flight.decode.id,) if flight.prefill is None else (flight.prefill.id, flight.decode.id)
        then = partial(self._handed_over, flight)
        flight.transfer = self._links.send(ends, flight.answer.prompt_tokens, then, wait=wait)

    def _handed_over(self, flight: Flight) -> None:
        flight.transfer = None
        self._chooser.moved(flight, now=self._agenda.now)
        self._release(flight)
        if flight.decode is not None and flight.answer is not None:
            flight.decode.working.arrive(flight.answer)
            self.poke(flight.decode)

    def _release(self, flight: Flight) -> None:
        """Prefill keeps nothing of it but its cache."""
        instance, job, flight.prefill, flight.prompt = flight.prefill, flight.prompt, None, None
        if instance is None:
            return
        instance.leave(flight)
        if instance.engine is not None and job is not None:
            instance.engine.withdraw(job)
            self.poke(instance)
        self._fleet.check_empty(instance)

    def _finished(self, flight: Flight, instance: Instance, at: float) -> None:
        instance.leave(flight)
        flight.prefill = flight.decode = flight.prompt = flight.answer = None
        flight.ended_at = at + self._setup.hop_seconds
        self._end(flight, status=Status.OK)
        self._fleet.check_empty(instance)

    # --- what goes wrong

    def _lost(self, instance: Instance, engine: Engine | None) -> None:
        """An instance is gone; its requests go on elsewhere."""
        affected, instance.flights = list(instance.flights), {}
        for flight in affected:
            if flight in self.open:
                self._go_on(flight, instance, engine)

    def _go_on(self, flight: Flight, lost: Instance, engine: Engine | None) -> None:
        job = flight.answer if flight.decode is lost else flight.prompt
        if flight.transfer is not None:
            self._links.call_off(flight.transfer)
            flight.transfer = None
        if flight.first_at is not None and flight.first_at > self._agenda.now:
            flight.first_at = None
        if flight.decode is lost and flight.prompt is not None and flight.prefill is not None:
            self._rebind(flight)
            return
        # What the client has is known to the router, and a part of the next prompt.
        if engine is not None and job is not None:
            had = job.prompt_tokens + engine.done(job, self._agenda.now) - flight.input_tokens
            flight.generated = min(max(had, flight.generated), flight.output_tokens - 1)
        self._leave_all(flight)
        flight.attempts += 1
        if flight.attempts > self._setup.attempts:
            self._end(flight, status=Status.FAILED, error="InstancesLost")
            return
        self.moved += 1
        self._begin(flight, is_new=False)

    def _rebind(self, flight: Flight) -> None:
        """Decode is gone, and prefill still has the KV, or is about to."""
        flight.decode = flight.answer = None
        if flight.prefill is None or flight.prompt is None:
            return
        if flight.prompt.phase is Phase.LEAVING:
            flight.prefill.working.park(flight.prompt)
        if flight.prompt.phase is Phase.PARKED:
            self._bind(flight)

    def _leave_all(self, flight: Flight) -> None:
        self._chooser.left(flight, self._agenda.now)
        for waiting in self.waiting.values():
            waiting.leave(flight)
        for instance, job in ((flight.prefill, flight.prompt), (flight.decode, flight.answer)):
            if instance is None:
                continue
            instance.leave(flight)
            if instance.engine is not None and job is not None:
                instance.engine.withdraw(job)
                self.poke(instance)
            self._fleet.check_empty(instance)
        flight.prefill = flight.decode = flight.prompt = flight.answer = None

    def _end(self, flight: Flight, *, status: Status, error: str = "") -> None:
        self._leave_all(flight)
        flight.status, flight.error = status, error
        del self.open[flight]
        for listener in self._listeners:
            listener.ended(flight)
        if not self.has_more and not self.open:
            self._done()
