"""Steps of the operator on simulated instances keep what every substrate promises."""

import asyncio
from dataclasses import replace

import pytest
from sim.scenarios import scenario

from kllm.bench.plan import Planned
from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.flights import Flight
from kllm.sim.laws.base import Pool
from kllm.sim.scenario import StartTimes
from kllm.sim.substrate import SimulatedSubstrate
from kllm.sim.virtual import run_virtually
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError

P, D = Role.PREFILL, Role.DECODE
SLOT, STARTING, SERVING, DRAINING = (
    InstanceState.SLOT, InstanceState.STARTING, InstanceState.SERVING, InstanceState.DRAINING,
)  # fmt: skip
TIMES = StartTimes(new=10.0, slot=2.0, prepare=8.0, switch=1.0)


class World:
    """A fleet without requests."""

    def __init__(self, agenda, **times):
        made = scenario((Planned(0, 0.0, 10, 10),), "static:1,1", starts=replace(TIMES, **times))
        self.agenda, self.fleet = agenda, Fleet(made, agenda)
        self.substrate = SimulatedSubstrate(self.fleet, agenda)
        self.request = Flight(0, 0.0, 10, 10)

    async def seen(self):
        return {each.id: each for each in await self.substrate.observe()}

    def busy(self, name):
        self.fleet.instances[name].flights[self.request] = None

    def idle(self, name):
        self.fleet.instances[name].leave(self.request)
        self.fleet.check_empty(self.fleet.instances[name])

    async def serving(self, role=P):
        name = await self.substrate.start(role)
        await asyncio.sleep(10.0)
        return name


def virtually(work, **times):
    agenda = Agenda()
    run_virtually(work(World(agenda, **times)), agenda)


def test_a_start_is_seen_at_once_and_serves_when_its_time_is_over():
    async def work(world):
        name = await world.substrate.start(D)
        found = (await world.seen())[name]
        assert (found.role, found.state) == (D, STARTING)
        await asyncio.sleep(9.9)
        assert (await world.seen())[name].state is STARTING
        await asyncio.sleep(0.1)
        found = (await world.seen())[name]
        assert (found.state, found.age_seconds, found.agent is None) == (SERVING, 10.0, False)

    virtually(work)


def test_what_does_not_serve_yet_is_cancelled_and_what_serves_is_not():
    async def work(world):
        name = await world.substrate.start(P)
        await world.substrate.cancel(name)
        assert await world.seen() == {}
        assert world.fleet.ledger.held == 0
        await world.substrate.cancel(name)
        other = await world.serving()
        with pytest.raises(StepRefusedError, match="Serving"):
            await world.substrate.cancel(other)

    virtually(work)


def test_a_drain_ends_when_it_is_empty_whoever_waits():
    async def work(world):
        name = await world.serving()
        world.busy(name)
        first = asyncio.create_task(world.substrate.drain(name, deadline_seconds=60, to=D))
        await asyncio.sleep(5)
        found = (await world.seen())[name]
        assert (found.state, found.drained, found.draining_to) == (DRAINING, False, D)
        first.cancel()
        world.agenda.after(5.0, lambda: world.idle(name))
        assert await world.substrate.drain(name, deadline_seconds=60, to=D)
        assert world.agenda.now == pytest.approx(20.5)
        assert (await world.seen())[name].drained
        assert await world.substrate.drain(name, deadline_seconds=60)

    virtually(work)


def test_a_drain_that_takes_too_long_is_overdue():
    async def work(world):
        name = await world.serving()
        world.busy(name)
        assert not await world.substrate.drain(name, deadline_seconds=30)
        found = (await world.seen())[name]
        assert (world.agenda.now, found.drained, found.overdue) == (40.0, False, True)
        with pytest.raises(StepRefusedError):
            await world.substrate.flip(name, D)
        await world.substrate.stop(name)
        assert await world.seen() == {}

    virtually(work)


def test_only_what_serves_is_drained():
    async def work(world):
        name = await world.substrate.start(P)
        with pytest.raises(StepRefusedError, match="Starting"):
            await world.substrate.drain(name, deadline_seconds=1)
        with pytest.raises(SubstrateError, match="nobody"):
            await world.substrate.drain("nobody", deadline_seconds=1)

    virtually(work)


def test_a_stop_is_seen_until_it_is_done_and_may_be_asked_for_by_many():
    async def work(world):
        name = await world.serving()
        stops = [asyncio.create_task(world.substrate.stop(name)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await world.seen())[name].ending
        assert world.fleet.ledger.held == 1
        await asyncio.gather(*stops)
        assert await world.seen() == {}
        assert world.fleet.ledger.held == 0
        await world.substrate.stop(name)

    virtually(work)


def test_a_flip_keeps_the_id_and_has_an_engine_of_its_own():
    async def work(world):
        name = await world.serving(D)
        await world.substrate.drain(name, deadline_seconds=5, to=P)
        flip = asyncio.create_task(world.substrate.flip(name, P))
        await asyncio.sleep(0)
        found = (await world.seen())[name]
        assert (found.role, found.state, found.draining_to) == (P, STARTING, None)
        assert await flip == 1.0
        found = (await world.seen())[name]
        assert (found.role, found.state, found.drained) == (P, SERVING, False)
        assert await world.substrate.flip(name, P) == 0.0
        assert world.fleet.instances[name].incarnation == 2
        world.fleet.ledger.settle(world.agenda.now)
        assert world.fleet.ledger.gpu_seconds == pytest.approx({Pool.PREFILL: 1.0, Pool.DECODE: 10.5})

    virtually(work)


def test_a_slot_becomes_an_instance_of_either_role_in_less_time():
    async def work(world):
        with pytest.raises(StepRefusedError, match="no slot"):
            await world.substrate.start(P, source=StartFrom.SLOT)
        name = await world.substrate.add_slot(P)
        found = (await world.seen())[name]
        assert (found.slot, found.state) == (True, STARTING)
        await asyncio.sleep(8)
        assert (await world.seen())[name].state is SLOT
        assert await world.substrate.start(D, source=StartFrom.SLOT) == name
        found = (await world.seen())[name]
        assert (found.slot, found.role, found.state) == (False, D, STARTING)
        await asyncio.sleep(2)
        assert (await world.seen())[name].state is SERVING

    virtually(work)


def test_a_server_at_the_gate_serves_its_own_role_at_once():
    async def work(world):
        name = await world.substrate.add_slot(P)
        await asyncio.sleep(8)
        assert (await world.seen())[name].state is InstanceState.GATED
        with pytest.raises(StepRefusedError, match="no slot"):
            await world.substrate.start(D, source=StartFrom.GATE)
        assert await world.substrate.start(P, source=StartFrom.GATE) == name
        await asyncio.sleep(0.5)
        assert (await world.seen())[name].state is SERVING

    virtually(work, gate=0.5)


def test_listeners_are_told_of_every_change():
    async def work(world):
        told = []
        world.substrate.subscribe(lambda: told.append(world.agenda.now))
        name = await world.serving()
        await world.substrate.drain(name, deadline_seconds=5, to=D)
        await world.substrate.flip(name, D)
        await world.substrate.stop(name)
        assert {0.0, 10.0, 10.5, 11.5, 12.0} <= set(told)

    virtually(work)
