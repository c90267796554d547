"""Carries out the operator's steps on simulated instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.instances import Instance
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.base import Observed, Substrate
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError

_NOT_SERVING_YET = frozenset({InstanceState.STARTING, InstanceState.SLOT, InstanceState.GATED, InstanceState.FAILED})


class SimulatedSubstrate(Substrate):
    """Instances of a simulated fleet. Belongs to one event loop in simulated time.

    Args:
        fleet: of instances.
        agenda: of the simulation.
    """

    def __init__(self, fleet: Fleet, agenda: Agenda) -> None:
        super().__init__()
        self._fleet, self._agenda = fleet, agenda
        self._going_on: dict[tuple[str, str], asyncio.Future[Any]] = {}
        fleet.subscribe(self._changed)

    def revision(self, role: Role) -> str:
        """One for both roles where their instances are of one kind."""
        return "" if self._fleet.alike else role.value

    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        """Begin one more instance."""
        pool = self._fleet.pool_of(role)
        if source is StartFrom.NEW:
            return self._fleet.start(pool).id
        state = InstanceState.GATED if source is StartFrom.GATE else InstanceState.SLOT
        ready = [each for each in self._fleet.instances.values() if each.state is state and not each.is_ending]
        able = [each for each in ready if each.pool is pool or (self._fleet.alike and source is StartFrom.SLOT)]
        if not able:
            raise StepRefusedError("NoSlot", f"there is no slot that can become {role}")
        slot = min(able, key=lambda each: (each.pool is not pool, each.made_at, each.id))
        self._fleet.start_in(slot, pool)
        return slot.id

    async def add_slot(self, role: Role) -> str:
        """Begin one more slot."""
        return self._fleet.add_slot(self._fleet.pool_of(role)).id

    async def cancel(self, instance_id: str) -> None:
        """Give up what does not serve yet."""
        instance = self._fleet.instances.get(instance_id)
        if instance is None or instance.is_ending:
            return
        if instance.state not in _NOT_SERVING_YET:
            raise StepRefusedError("AlreadyServing", f"{instance_id} is {instance.state}")
        self._fleet.cancel(instance)

    async def drain(self, instance_id: str, *, deadline_seconds: float, to: Role | None = None) -> bool:
        """Let an instance finish what it has."""
        instance, key = self._get(instance_id), ("drain", instance_id)
        if key not in self._going_on:
            if instance.state is InstanceState.DRAINING:
                return instance.is_drained
            if instance.state is not InstanceState.SERVING:
                raise StepRefusedError("NotServing", f"{instance_id} is {instance.state}")
            instance.becomes = to
            self._fleet.drain(instance, deadline=deadline_seconds, then=self._begin(key))
        return bool(await asyncio.shield(self._going_on[key]))

    async def stop(self, instance_id: str) -> None:
        """End an instance."""
        instance, key = self._fleet.instances.get(instance_id), ("stop", instance_id)
        if instance is None:
            return
        if key not in self._going_on:
            then = self._begin(key)
            self._fleet.stop(instance, lambda: then(None))
        await asyncio.shield(self._going_on[key])

    async def flip(self, instance_id: str, to: Role) -> float:
        """Let a drained instance serve the other role."""
        instance, key = self._get(instance_id), ("flip", instance_id)
        if key not in self._going_on:
            if instance.role is to and instance.state is InstanceState.SERVING:
                return 0.0
            if not instance.is_drained or instance.is_ending:
                raise StepRefusedError("NotDrained", f"{instance_id} is {instance.state}")
            self._fleet.flip(instance, self._fleet.pool_of(to), self._begin(key))
        return float(await asyncio.shield(self._going_on[key]))

    async def observe(self) -> Sequence[Observed]:
        """All instances that are not gone."""
        return [self._observed(each) for _, each in sorted(self._fleet.instances.items())]

    def _observed(self, instance: Instance) -> Observed:
        return Observed(
            instance.id, instance.role, instance.state, f"{instance.id}:1", instance.message,
            age_seconds=self._agenda.now - instance.begun_at,
            drained=instance.is_drained, overdue=instance.is_overdue, ending=instance.is_ending, slot=instance.is_slot,
            revision=self.revision(instance.role), draining_to=instance.becomes,
        )  # fmt: skip

    def _begin(self, key: tuple[str, str]) -> Callable[[Any], None]:
        """Something begins; returns what ends it."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._going_on[key] = future

        def then(result: Any) -> None:
            self._going_on.pop(key, None)
            if not future.done():
                future.set_result(result)

        return then

    def _get(self, instance_id: str) -> Instance:
        instance = self._fleet.instances.get(instance_id)
        if instance is None:
            raise SubstrateError(f"there is no instance {instance_id}")
        return instance
