"""Runs a scenario to its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from kllm.bench.row import Status
from kllm.sim import tally
from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.laws.base import Counts
from kllm.sim.outcome import Decision, Outcome, Point, Speed
from kllm.sim.planning import Planning, counts
from kllm.sim.reactive import Reactive
from kllm.sim.scenario import SLO, Scenario
from kllm.sim.traffic import Listener, Traffic
from kllm_core.fleet import InstanceState
from kllm_operator.history.recorder import Recorder
from kllm_operator.loop.account import why_document
from kllm_operator.loop.events import Planned, load_document

Progress = Callable[[float, int], None]
"""Told of simulated seconds and of requests that have ended."""

_LOOK_SECONDS = 5.0
"""Simulated seconds between two looks at whether somebody wants to know, or wants to stop."""


def simulate(
    scenario: Scenario,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    recorder: Recorder | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Run a scenario. The same scenario has the same outcome, but for its `speed`.

    Args:
        scenario: what is run.
        progress: told now and then of simulated seconds and of requests that have ended.
        stop: asked now and then; once it says yes, what has happened by then is the outcome.
        recorder: writes down what `slo` decides from; None: nobody does.
        listener: hears of each request; None: nobody does.

    Raises:
        ScenarioError: it cannot be run; the text names the field.
        ValueError: there is no such law or knob.
    """
    run = _Run(scenario, progress, stop, recorder)
    if listener is not None:
        run.traffic.subscribe(listener)
    return run.whole()


class _Run:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        progress: Progress | None,
        stop: Callable[[], bool] | None,
        recorder: Recorder | None,
    ) -> None:
        self.scenario, self.progress, self.stop = scenario, progress, stop
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.agenda = Agenda()
        self.fleet = Fleet(scenario, self.agenda)
        self.traffic = Traffic(scenario, self.agenda, self.fleet, done=self._all_ended)
        self.decisions: list[Decision] = []
        self.points: list[Point] = []
        self.sampled_flights = 0
        self.is_over = self.is_interrupted = False
        self.brain: Planning | Reactive
        if scenario.policy == SLO:
            self.brain = Planning(scenario, self.agenda, self.fleet, decided=self._planned, recorder=recorder)
            self.traffic.subscribe(self.brain.heard)
        else:
            self.brain = Reactive(scenario, self.agenda, self.fleet, self.traffic, decided=self._decided)
            self.traffic.subscribe(self.brain)
        self.agenda.at(scenario.ends_at, self._all_ended)
        self.agenda.at(scenario.ends_at + scenario.grace, self._finish)
        self.agenda.after(scenario.sample_seconds, self._sample)
        self.agenda.after(_LOOK_SECONDS, self._look)

    def whole(self) -> Outcome:
        if isinstance(self.brain, Planning):
            self.brain.run()
        while not self.is_over:
            self.agenda.step()
        self.traffic.give_up()
        return self._outcome()

    # --- when it ends

    def _all_ended(self) -> None:
        if self.agenda.now >= self.scenario.ends_at and not self.traffic.has_more and not self.traffic.open:
            self._finish()

    def _finish(self) -> None:
        self.is_over = True
        if isinstance(self.brain, Planning):
            self.brain.finish()

    def _look(self) -> None:
        if self.progress is not None:
            self.progress(self.agenda.now, len(self.traffic.flights) - len(self.traffic.open))
        if self.stop is not None and self.stop():
            self.is_interrupted = True
            self._finish()
        self.agenda.after(_LOOK_SECONDS, self._look)

    # --- what is kept

    def _planned(self, planned: Planned) -> None:
        loads = {load.role.value: load_document(load) for load in planned.loads}
        desired = {pool.value: count for pool, count in counts(planned.desired, self.scenario.pools).items()}
        self.decisions.append(
            Decision(
                self.agenda.now, desired, self._serving(), planned.desired.reason, planned.desired.message, loads,
                why=None if planned.why is None else why_document(planned.why),
            )
        )  # fmt: skip

    def _decided(self, decision: Counts) -> None:
        desired = {pool.value: count for pool, count in decision.counts.items()}
        self.decisions.append(
            Decision(self.agenda.now, desired, self._serving(), decision.reason, decision.message)
        )  # fmt: skip

    def _serving(self) -> dict[str, int]:
        return {pool.value: len(self.fleet.serving(pool)) for pool in self.scenario.pools}

    def _sample(self) -> None:
        now, fleet = self.agenda.now, self.fleet
        loads = {
            pool: [load for each in fleet.serving(pool) if (load := each.load(now)) is not None]
            for pool in self.scenario.pools
        }
        total = {pool: sum(load.kv_total_tokens or 0 for load in each) for pool, each in loads.items()}
        used = {pool: sum(load.kv_used_tokens or 0 for load in each) for pool, each in loads.items()}
        slots = {pool: fleet.slots(pool) for pool in self.scenario.pools}
        warming = {pool: sum(each.state is InstanceState.STARTING for each in slots[pool]) for pool in slots}
        arrived = len(self.traffic.flights)
        self.points.append(
            Point(
                at=now,
                rate=(arrived - self.sampled_flights) / self.scenario.sample_seconds,
                desired={pool.value: count for pool, count in self.brain.desired.items()},
                serving=self._serving(),
                starting={pool.value: len(fleet.of(pool, InstanceState.STARTING)) + warming[pool] for pool in slots},
                draining={pool.value: len(fleet.of(pool, InstanceState.DRAINING)) for pool in slots},
                idle={pool.value: len(slots[pool]) - warming[pool] for pool in slots},
                queued={
                    pool.value: sum(load.queued_requests or 0 for load in each) + len(self.traffic.waiting[pool])
                    for pool, each in loads.items()
                },
                parked=sum(load.parked_requests or 0 for each in loads.values() for load in each),
                running={pool.value: sum(load.running_requests or 0 for load in each) for pool, each in loads.items()},
                kv_use={pool.value: used[pool] / total[pool] if total[pool] else 0.0 for pool in loads},
                loads=dict(self.brain.loads) if isinstance(self.brain, Planning) else {},
            )
        )
        self.sampled_flights = arrived
        self.agenda.after(self.scenario.sample_seconds, self._sample)

    def _outcome(self) -> Outcome:
        scenario, fleet, traffic = self.scenario, self.fleet, self.traffic
        fleet.ledger.settle(self.agenda.now)
        flights = [flight for flight in traffic.flights if flight.is_counted]
        seconds = max(0.0, self.agenda.now - scenario.count_from)
        held = fleet.ledger.gpu_seconds
        tokens = sum(flight.output_tokens for flight in traffic.flights if flight.status is Status.OK)
        wall, cpu = time.perf_counter() - self.began, time.process_time() - self.cpu_began
        return Outcome(
            policy=scenario.policy,
            seed=scenario.seed,
            requests=tally.requests(flights, retracted=traffic.retracted, moved=traffic.moved),
            attainment=tally.attainment(flights, scenario.objectives),
            ttft=tally.percentiles(flight.ttft for flight in flights),
            tpot=tally.percentiles(flight.tpot for flight in flights),
            simulated_seconds=seconds,
            gpu_seconds=sum(held.values()),
            cost=sum(held[pool] * setup.price for pool, setup in scenario.pools.items()),
            pool_gpu_seconds={pool.value: gpu_seconds for pool, gpu_seconds in held.items()},
            mean_replicas={
                pool.value: _over(held[pool], setup.gpus * seconds) for pool, setup in scenario.pools.items()
            },
            peak=fleet.ledger.peak,
            flips=fleet.flips,
            starts=fleet.starts,
            cancelled=fleet.cancelled,
            failures=fleet.failures,
            output_tokens=tokens,
            cached_share=tally.cached_share(flights),
            stages=tally.stages(flights),
            decisions=tuple(self.decisions),
            series=tally.with_attained(self.points, traffic.flights, scenario.objectives),
            speed=Speed(wall, cpu, _over(tokens, cpu), self.agenda.events),
            is_interrupted=self.is_interrupted,
        )


def _over(value: float, over: float) -> float:
    return value / over if over > 0 else 0.0
