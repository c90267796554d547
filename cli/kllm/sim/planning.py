"""Runs the operator's own control loop on a simulated fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.laws.base import Pool
from kllm.sim.scenario import PoolSetup, Scenario
from kllm.sim.substrate import SimulatedSubstrate
from kllm.sim.telling import SimulatedHeard
from kllm.sim.virtual import run_virtually
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_core.timing import EngineTiming
from kllm_operator.fleet.levels import LevelReport
from kllm_operator.history.recorder import Recorder
from kllm_operator.loop.control import Control, Scaled
from kllm_operator.loop.events import Event, Planned
from kllm_operator.loop.report import Report
from kllm_operator.plan.members import Limits, PoolLimits


class _Watched(Control):
    """The loop as it is, but what it survives in a cluster ends a simulation.

    Attributes:
        fault: what a tick failed with.
        on_fault: called then.
    """

    fault: Exception | None = None
    on_fault: Callable[[], None] = staticmethod(lambda: None)

    async def tick(self) -> None:
        """As it is."""
        try:
            await super().tick()
        except Exception as error:
            self.fault = error
            self.on_fault()
            raise


class Planning:
    """The operator's loop in one run.

    Attributes:
        heard: what it hears; it is to be told of requests.
        desired: counts by pool, as the loop last reported them.
        loads: by role, likewise.

    Args:
        scenario: that is run.
        agenda: of the simulation.
        fleet: of instances.
        decided: hears of each decision.
        recorder: writes down what is decided from; None: nobody does.
    """

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        fleet: Fleet,
        *,
        decided: Callable[[Planned], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._scenario, self._agenda, self._fleet, self._decided = scenario, agenda, fleet, decided
        self._recorder = recorder
        hear = recorder.hear if recorder is not None else _forget
        self.heard = SimulatedHeard(agenda, fleet, scenario.loop.levels, hear=hear)
        self.desired: dict[Pool, int] = {}
        self.loads: dict[str, float | None] = {}
        self._finished: asyncio.Event | None = None
        for pool, setup in scenario.pools.items():
            serving = setup.least if setup.initial is None else setup.initial
            for _ in range(serving):
                fleet.serve_at_once(pool)
            self.desired[pool] = serving

    def run(self) -> None:
        """Run until `finish` is called."""
        run_virtually(self._work(), self._agenda)

    def finish(self) -> None:
        """The run is over."""
        if self._finished is not None:
            self._finished.set()

    async def _work(self) -> None:
        self._finished = asyncio.Event()
        control = _Watched(
            self._scaled(), SimulatedSubstrate(self._fleet, self._agenda), self.heard,
            tell=self._told, publish=self._published, settings=self._scenario.loop,
        )  # fmt: skip
        control.on_fault = self._finished.set
        loop = asyncio.create_task(control.run())
        await self._finished.wait()
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        if control.fault is not None:
            raise control.fault

    def _scaled(self) -> Scaled:
        scenario, pools = self._scenario, self._scenario.pools
        is_one = Pool.ONE in pools
        limits = Limits(
            PoolLimits(0, 0, pools[Pool.ONE].gpus) if is_one else _limits(pools[Pool.PREFILL]),
            _limits(pools[Pool.ONE if is_one else Pool.DECODE]),
            gpu_budget=scenario.gpu_budget,
        )
        timing = EngineTiming(
            pools[Pool.ONE if is_one else Pool.PREFILL].engine.timing.prefill,
            pools[Pool.ONE if is_one else Pool.DECODE].engine.timing.decode,
        )
        return Scaled(
            scenario.objectives,
            limits,
            timing=timing if scenario.warm else None,
            start_seconds=scenario.starts.new if scenario.warm else None,
            one_pool=is_one,
        )

    def _told(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._decided(event)

    def _published(self, report: Report) -> None:
        self.desired = counts(report.desired, self.desired)
        self.loads = {load.role.value: load.load.value for load in report.loads}
        if self._recorder is not None:
            self._recorder.publish(report, complete=True)


def counts(desired: DesiredCounts, pools: Iterable[Pool]) -> dict[Pool, int]:
    """What was decided, by pool; engines for whole requests have decode's count."""
    return {pool: desired.of(Role.PREFILL if pool is Pool.PREFILL else Role.DECODE) for pool in pools}


def _forget(report: LevelReport) -> None:
    """Nobody records."""


def _limits(pool: PoolSetup) -> PoolLimits:
    return PoolLimits(pool.least, pool.most, pool.gpus, pool.slots, pool.price)
