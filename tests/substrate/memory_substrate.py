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
        bad: revisions whose instances fail a second after they were started.
        revisions: what starts in each role make.
        requested: what people ask of instances.
        refuses: instances whose engine does not switch roles.
        breaks: instances whose engine breaks when it switches roles.
        seconds: that each kind of step takes at least.
    """

    def __init__(self, *, ready_seconds=1800.0, **seconds):
        super().__init__()
        self.busy, self.slow, self.refuses, self.breaks = {}, set(), set(), set()
        self.bad, self.revisions, self.requested = set(), dict.fromkeys(Role, ""), {}
        self.seconds = {"start": 0.01, "drain": 0.01, "stop": 0.01, "switch": 0.01, "assume": 0.01} | seconds
        self.ready_seconds = ready_seconds
        self.made = dict.fromkeys(Role, 0)
        self.slots_made = 0
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

    def revision(self, role: Role) -> str:
        return self.revisions[role]

    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        if source is StartFrom.SLOT:
            return await self._assume(role)
        name = f"chat-{role}-{self.made[role]}"
        self.made[role] += 1
        self._begin(name, role)
        return name

    async def add_slot(self, role: Role) -> str:
        name = f"chat-slot-{self.slots_made}"
        self.slots_made += 1
        self._begin(name, role, slot=True)
        return name

    async def dismiss(self, instance_id: str) -> None:
        self.requested.pop(instance_id, None)
        self._changed()

    async def cancel(self, instance_id: str) -> None:
        if (seen := self._known(instance_id)) is not None:
            if seen.state not in {S.STARTING, S.FAILED, S.SLOT}:
                raise StepRefusedError("AlreadyServing", f"{instance_id} is {seen.state}")
            await self._end(instance_id, 0.0)

    async def drain(self, instance_id: str, *, deadline_seconds: float, to: Role | None = None) -> bool:
        seen = self._get(instance_id)
        if seen.state not in {S.SERVING, S.DRAINING} or seen.ending:
            raise StepRefusedError("NotServing", f"{instance_id} is {seen.state}")
        self._put(instance_id, state=S.DRAINING, message="drains", draining_to=to)
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
            self.requested.pop(instance_id, None)
            self._put(instance_id, role=to, state=S.STARTING, draining_to=None)
        return await self._ongoing.join("flip", instance_id, lambda: self._switch(instance_id, to))

    async def observe(self) -> Sequence[Observed]:
        for name, seen in self._all.items():
            if seen.state is S.STARTING and self.now - self._since[name][1] > self.ready_seconds:
                self._all[name] = replace(seen, state=S.FAILED, message=f"is not ready after {self.ready_seconds} s")
        return [self._told_of(seen) for _, seen in sorted(self._all.items())]

    def _told_of(self, seen: Observed) -> Observed:
        return replace(
            seen, age_seconds=self.now - self._since[seen.id][0], requested=self.requested.get(seen.id),
            outdated=seen.revision != self.revisions[seen.role],
        )  # fmt: skip

    async def close(self) -> None:
        for task in self._starts.values():
            task.cancel()
        await asyncio.gather(*self._starts.values(), return_exceptions=True)
        await self._ongoing.end()

    def _begin(self, name: str, role: Role, *, slot: bool = False) -> None:
        self._since[name] = (self.now, self.now)
        revision = self.revisions[role]
        self._all[name] = Observed(name, role, S.STARTING, f"{name}:1", "starts", 0.0, slot=slot, revision=revision)
        self._starts[name] = asyncio.create_task(self._get_ready(name, self.seconds["start"]))
        self._changed()

    async def _assume(self, role: Role) -> str:
        usable = [each for each in await self.observe() if each.state is S.SLOT and not each.outdated]
        alike = self.revisions[Role.PREFILL] == self.revisions[Role.DECODE]
        able = [each for each in usable if each.role is role or alike]
        if not able:
            raise StepRefusedError("NoSlot", f"there is no slot that can become {role}")
        name = min(able, key=lambda each: (each.role is not role, -each.age_seconds)).id
        self._put(name, role=role, state=S.STARTING, slot=False)
        self._starts[name] = asyncio.create_task(self._get_ready(name, self.seconds["assume"]))
        return name

    async def _get_ready(self, name: str, seconds: float) -> None:
        if self._all[name].revision in self.bad:
            await asyncio.sleep(1.0)
            self.die(name, "has no such image")
            return
        await asyncio.sleep(seconds)
        await polled(lambda: name not in self.slow, every_seconds=seconds)
        if name in self._all and self._all[name].state is S.STARTING:
            ready = S.SLOT if self._all[name].slot else S.SERVING
            self._put(name, state=ready, message="serves")

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
        made = [*self.made.items(), ("slot", self.slots_made)]
        if any(name == f"chat-{kind}-{n}" for kind, count in made for n in range(count)):
            return self._all.get(name)
        return self._get(name)
