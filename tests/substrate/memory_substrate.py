"""A substrate without anything behind it: the reference for others, and quick enough for virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from substrate.polling import polled

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.base import Observed, Substrate
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError
from kllm_operator.substrate.ongoing import Ongoing

S = InstanceState


class MemorySubstrate(Substrate):
    """Instances that are records. Belongs to one event loop, whose time it goes by.

    Attributes:
        busy: requests that an instance has; it is drained when there are none.
        slow: instances that do not get ready while they are in it; may name those to come.
        refuses: instances whose engine does not switch roles.
        breaks: instances whose engine breaks when it switches roles.
        seconds: that each kind of step takes at least.
    """

    def __init__(self, *, ready_seconds=1800.0, **seconds):
        super().__init__()
        self.busy, self.slow, self.refuses, self.breaks = {}, set(), set(), set()
        self.seconds = {"start": 0.01, "drain": 0.01, "stop": 0.01, "switch": 0.01} | seconds
        self.ready_seconds = ready_seconds
        self.made = dict.fromkeys(Role, 0)
        self._all: dict[str, Observed] = {}
        self._since: dict[str, tuple[float, float]] = {}
        self._ongoing = Ongoing()
        self._starts: dict[str, asyncio.Task] = {}

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def die(self, instance_id: str, message: str = "was ended by SIGKILL") -> None:
        """An engine ends by itself."""
        self._put(instance_id, state=S.FAILED, message=message)

    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        name = f"chat-{role}-{self.made[role]}"
        self.made[role] += 1
        self._since[name] = (self.now, self.now)
        self._all[name] = Observed(name, role, S.STARTING, f"{name}:1", "starts", 0.0)
        self._starts[name] = asyncio.create_task(self._get_ready(name))
        self._changed()
        return name

    async def cancel(self, instance_id: str) -> None:
        if (seen := self._known(instance_id)) is not None:
            if seen.state not in {S.STARTING, S.FAILED}:
                raise StepRefusedError("AlreadyServing", f"{instance_id} is {seen.state}")
            await self._end(instance_id, 0.0)

    async def drain(self, instance_id: str, *, deadline_seconds: float) -> bool:
        seen = self._get(instance_id)
        if seen.state not in {S.SERVING, S.DRAINING} or seen.ending:
            raise StepRefusedError("NotServing", f"{instance_id} is {seen.state}")
        self._put(instance_id, state=S.DRAINING, message="drains")
        return await self._ongoing.join("drain", instance_id, lambda: self._drain(instance_id, deadline_seconds))

    async def stop(self, instance_id: str) -> None:
        if self._known(instance_id) is not None:
            await self._end(instance_id, self.seconds["stop"])

    async def flip(self, instance_id: str, to: Role) -> float:
        seen = self._get(instance_id)
        if seen.role is to and seen.state is S.SERVING:
            return 0.0
        if not self._ongoing.has("flip", instance_id):
            if not seen.drained or seen.ending:
                raise StepRefusedError("NotDrained", f"{instance_id} is {seen.state}")
            self._put(instance_id, role=to, state=S.STARTING)
        return await self._ongoing.join("flip", instance_id, lambda: self._switch(instance_id, to))

    async def observe(self) -> Sequence[Observed]:
        for name, seen in self._all.items():
            if seen.state is S.STARTING and self.now - self._since[name][1] > self.ready_seconds:
                self._all[name] = replace(seen, state=S.FAILED, message=f"is not ready after {self.ready_seconds} s")
        return [replace(seen, age_seconds=self.now - self._since[name][0]) for name, seen in sorted(self._all.items())]

    async def close(self) -> None:
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*self._starts.values(), return_exceptions=True)
        await self._ongoing.end()

    async def _get_ready(self, name: str) -> None:
        await asyncio.sleep(self.seconds["start"])
        await polled(lambda: name not in self.slow, every_seconds=self.seconds["start"])
        if name in self._all and self._all[name].state is S.STARTING:
            self._put(name, state=S.SERVING, message="serves")

    async def _drain(self, name: str, deadline_seconds: float) -> bool:
        try:
            async with asyncio.timeout(deadline_seconds):
                await asyncio.sleep(self.seconds["drain"])
                await polled(lambda: not self.busy.get(name))
        except TimeoutError:
            self._put(name, overdue=True)
            return False
        self._put(name, drained=True, overdue=False)
        return True

    async def _switch(self, name: str, to: Role) -> float:
        await asyncio.sleep(self.seconds["switch"])
        if name in self.refuses:
            self._put(name, role=to.other, state=S.DRAINING)
            raise StepRefusedError("CannotFlip", f"{name} does not switch roles")
        if name in self.breaks:
            self._put(name, role=to.other, state=S.DRAINING)
            raise SubstrateError(f"{name} did not switch roles")
        self._put(name, state=S.SERVING, drained=False)
        return self.seconds["switch"]

    async def _end(self, name: str, seconds: float) -> None:
        self._put(name, ending=True)
        await self._ongoing.join("end", name, lambda: self._gone(name, seconds))

    async def _gone(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._starts.pop(name).cancel()
        del self._all[name]
        self._changed()

    def _put(self, name: str, **changes: object) -> None:
        before = self._all[name]
        self._all[name] = replace(before, **changes)
        if self._all[name].state is not before.state:
            self._since[name] = (self._since[name][0], self.now)
        self._changed()

    def _get(self, name: str) -> Observed:
        if name not in self._all:
            raise StepRefusedError("NoSuchInstance", f"there is no instance {name!r}")
        return self._all[name]

    def _known(self, name: str) -> Observed | None:
        if any(name == f"chat-{role}-{n}" for role, made in self.made.items() for n in range(made)):
            return self._all.get(name)
        return self._get(name)
