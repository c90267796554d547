"""Carries out a scaling law: asks it in time, starts what is missing and drains what is too much."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kllm.bench.row import Status
from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm.sim.laws import registry
from kllm.sim.laws.base import Arrival, Bounds, Counts, EngineView, Latencies, Observation, Pool, PoolView, Setup
from kllm.sim.scenario import Scenario
from kllm.sim.traffic import Traffic
from kllm_core.fleet import InstanceState
from kllm_core.timing import EngineTiming


class Reactive:
    """One law in one run. Implements `Listener` of requests.

    Attributes:
        desired: counts by pool.

    Args:
        scenario: that is run.
        agenda: of the simulation.
        fleet: of instances.
        traffic: of requests.
        decided: hears of each decision.
    """

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        fleet: Fleet,
        traffic: Traffic,
        *,
        decided: Callable[[Counts], None],
    ) -> None:
        self._agenda, self._fleet, self._traffic, self._decided = agenda, fleet, traffic, decided
        self._law = registry.build(scenario.policy, _setup(scenario), scenario.knobs)
        self._drain_seconds = scenario.loop.drain_seconds
        self._is_due = False
        self._arrived: deque[Flight] = deque()
        self._showed: dict[Flight, None] = {}
        self._finished: deque[Flight] = deque()
        self._busy: dict[str, deque[tuple[float, float]]] = {}
        first = self._law.decide(Observation(0.0, {pool: PoolView() for pool in scenario.pools}))
        self.desired = dict(first.counts)
        for pool, setup in scenario.pools.items():
            serving = self.desired[pool] if setup.initial is None else setup.initial
            for _ in range(serving):
                fleet.serve_at_once(pool)
        decided(first)
        fleet.subscribe(self._soon)
        self._soon()
        if self._law.interval_seconds < math.inf:
            agenda.after(self._law.interval_seconds, self._ask)

    # --- requests

    def arrived(self, flight: Flight) -> None:
        """A request has come."""
        self._arrived.append(flight)

    def showed(self, flight: Flight) -> None:
        """Its first token comes."""
        self._showed[flight] = None

    def ended(self, flight: Flight) -> None:
        """A request has ended, however it did."""
        if flight.status is Status.OK:
            self._finished.append(flight)

    # --- the law

    def _ask(self) -> None:
        decision = self._law.decide(self._observe())
        if decision.counts != self.desired:
            self.desired = dict(decision.counts)
            self._decided(decision)
            self._soon()
        self._agenda.after(self._law.interval_seconds, self._ask)

    def _observe(self) -> Observation:
        now = self._agenda.now
        window = min(self._law.window_seconds, now)
        since = now - window
        while self._arrived and self._arrived[0].at < since:
            self._arrived.popleft()
        while self._finished and (self._finished[0].ended_at or 0.0) < since:
            self._finished.popleft()
        ttfts = []
        for flight in list(self._showed):
            if flight.first_at is None or flight.first_at < since:
                del self._showed[flight]
            elif flight.first_at <= now and flight.ttft is not None:
                ttfts.append(flight.ttft)
        inputs = sum(flight.input_tokens for flight in self._arrived)
        cached = sum(flight.cached_tokens for flight in self._arrived)
        outputs = [flight.output_tokens for flight in self._finished]
        return Observation(
            time=now,
            pools={pool: self._view(pool, now, since) for pool in self.desired},
            window_seconds=window,
            arrived=len(self._arrived),
            input_tokens=inputs / len(self._arrived) if self._arrived else None,
            cached_share=cached / inputs if inputs else 0.0,
            output_tokens=sum(outputs) / len(outputs) if outputs else None,
            ttft=_latencies(ttfts),
            tpot=_latencies([flight.tpot for flight in self._finished if flight.tpot is not None]),
        )

    def _view(self, pool: Pool, now: float, since: float) -> PoolView:
        waiting = self._traffic.waiting[pool]
        return PoolView(
            engines=tuple(self._engine(each, now, since) for each in self._fleet.serving(pool)),
            starting=len(self._fleet.of(pool, InstanceState.STARTING)),
            desired=self.desired[pool],
            draining=len(self._fleet.of(pool, InstanceState.DRAINING)),
            waiting_requests=len(waiting),
            waiting_tokens=waiting.tokens,
        )

    def _engine(self, instance: Instance, now: float, since: float) -> EngineView:
        load = instance.load(now)
        if load is None or instance.engine is None:
            return EngineView()
        marks = self._busy.setdefault(instance.id, deque([(instance.begun_at, 0.0)]))
        busy = instance.engine.busy_seconds(now)
        while len(marks) > 1 and marks[1][0] <= since:
            marks.popleft()
        at, before = marks[0]
        marks.append((now, busy))
        return EngineView(
            queued_requests=load.queued_requests or 0,
            running_requests=load.running_requests or 0,
            queued_tokens=load.queued_uncached_tokens or 0,
            kv_used_tokens=load.kv_used_tokens or 0,
            kv_total_tokens=load.kv_total_tokens or 0,
            utilisation=min(1.0, max(0.0, (busy - before) / (now - at))) if now > at else 0.0,
        )

    # --- its decisions

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._agenda.at(self._agenda.now, self._carry_out)

    def _carry_out(self) -> None:
        self._is_due = False
        for instance in list(self._fleet.instances.values()):
            if instance.state is InstanceState.FAILED and not instance.is_ending:
                self._fleet.stop(instance)
        coming = {pool: len(self._coming(pool)) for pool in self.desired}
        for pool in self.desired:
            for _ in range(coming[pool] - self.desired[pool]):
                self._give_up_one(pool)
        # Where the budget doesn't hold all, the pool that has the smaller part of what it should have comes first.
        while short := [each for each in self.desired if coming[each] < self.desired[each] and self._fleet.fits(each)]:
            pool = min(short, key=lambda each: coming[each] / self.desired[each])
            self._fleet.start(pool)
            coming[pool] += 1

    def _coming(self, pool: Pool) -> list[Instance]:
        return self._fleet.of(pool, InstanceState.SERVING, InstanceState.STARTING)

    def _give_up_one(self, pool: Pool) -> None:
        """First what does not serve yet, the newest of it; then what has the fewest requests."""
        starting = self._fleet.of(pool, InstanceState.STARTING)
        if starting:
            self._fleet.cancel(starting[-1])
            return
        least = min(reversed(self._fleet.serving(pool)), key=lambda each: len(each.flights))
        self._fleet.drain(least, deadline=self._drain_seconds, then=lambda _: self._fleet.stop(least))


def _setup(scenario: Scenario) -> Setup:
    pools = scenario.pools
    prefill, decode = (
        pools[Pool.ONE if Pool.ONE in pools else pool].engine for pool in (Pool.PREFILL, Pool.DECODE)
    )  # fmt: skip
    return Setup(
        bounds={pool: Bounds(setup.least, setup.most, setup.gpus) for pool, setup in pools.items()},
        objectives=scenario.objectives,
        timing=EngineTiming(prefill.timing.prefill, decode.timing.decode),
        kv_total_tokens=decode.kv_tokens,
        chunk_tokens=prefill.chunk_tokens,
        start_seconds=scenario.starts.new,
        gpu_budget=scenario.gpu_budget,
        arrivals=tuple(Arrival(each.at, each.input_tokens, each.output_tokens) for each in scenario.load),
    )


def _latencies(seconds: Sequence[float]) -> Latencies | None:
    if not seconds:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
    return Latencies(sum(seconds) / len(seconds), p50, p90, p99, len(seconds), tuple(seconds))
