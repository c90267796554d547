"""Carries out single steps on a substrate, and measures them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kllm_core.objectives import Role
from kllm_core.steps import Cancel, Drain, Flip, Prepare, Start, StepDecision, Stop
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.events import Ended, Event, Stepped
from kllm_operator.substrate.base import Substrate
from kllm_operator.substrate.exceptions import SubstrateError


class Hands:
    """One step at a time; what takes long goes on while others look at what `observe` tells of it.

    Attributes:
        unflippable: instances whose switch of role failed or was refused.
        drain_seconds: deadline of drains.
        troubles: why the last start in a role was not possible, if it was not.

    Args:
        substrate: where instances live.
        book: learns how long steps take.
        tell: hears of each step and of its end; must not wait or raise.
        clock: monotonic seconds.
        drain_seconds: deadline of drains.
    """

    def __init__(
        self,
        substrate: Substrate,
        *,
        book: CapacityBook,
        tell: Callable[[Event], None],
        clock: Callable[[], float],
        drain_seconds: float,
    ) -> None:
        self.unflippable: frozenset[str] = frozenset()
        self.drain_seconds = drain_seconds
        self.troubles: dict[Role, str] = {}
        self._substrate = substrate
        self._book = book
        self._tell = tell
        self._clock = clock
        self._tasks: set[asyncio.Task[bool]] = set()

    async def carry_out(self, decision: StepDecision, role: Role, *, decided_at: float) -> bool:
        """Begin a step; whether that was possible.

        Args:
            decision: with a step.
            role: that the step's instance has now.
            decided_at: when the plan asked for it.
        """
        step = decision.step
        if isinstance(step, Start | Prepare):
            return await self._start(step, decision, decided_at)
        if step is None:
            return False
        self._tell(Stepped(step, step.instance_id, decision.reason, decision.message))
        if isinstance(step, Flip):
            self._book.decided(step.instance_id, step.to, "Flip", at=decided_at)
        task = asyncio.create_task(self._rest(step, role), name=f"{type(step).__name__} {step.instance_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The step begins here, so that whoever looks next sees it.
        await asyncio.sleep(0)
        return not task.done() or task.result()

    async def close(self) -> None:
        """Wait for nothing any more. What was begun goes on where the substrate promises it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, step: Start | Prepare, decision: StepDecision, decided_at: float) -> bool:
        began = self._clock()
        try:
            if isinstance(step, Prepare):
                instance_id = await self._substrate.add_slot(step.role)
            else:
                instance_id = await self._substrate.start(step.role, source=step.source)
        except SubstrateError as error:
            self.troubles[step.role] = str(error)
            self._tell(Ended(step, step.role.value, self._clock() - began, str(error)))
            return False
        self.troubles.pop(step.role, None)
        if isinstance(step, Start):
            self._book.decided(instance_id, step.role, "Start", at=decided_at, source=step.source)
        self._tell(Stepped(step, instance_id, decision.reason, decision.message))
        return True

    async def _rest(self, step: Cancel | Drain | Stop | Flip, role: Role) -> bool:
        """Carry out a step to its end; whether it went well."""
        began = self._clock()
        error, switch = "", None
        try:
            switch = await self._call(step)
        except SubstrateError as refused:
            error = str(refused)
        seconds = self._clock() - began
        if isinstance(step, Drain) and not error:
            self._book.drained(role, seconds)
        if isinstance(step, Cancel | Stop):
            self._book.forget(step.instance_id)
        if isinstance(step, Flip):
            if error:
                self._book.forget(step.instance_id)
                self.unflippable |= {step.instance_id}
            elif switch is not None:
                self._book.switched(switch)
        self._tell(Ended(step, step.instance_id, seconds, error, switch))
        return not error

    async def _call(self, step: Cancel | Drain | Stop | Flip) -> float | None:
        if isinstance(step, Cancel):
            await self._substrate.cancel(step.instance_id)
        elif isinstance(step, Stop):
            await self._substrate.stop(step.instance_id)
        elif isinstance(step, Flip):
            return await self._substrate.flip(step.instance_id, step.to)
        elif not await self._substrate.drain(step.instance_id, deadline_seconds=self.drain_seconds, to=step.to):
            raise SubstrateError(f"not empty after {self.drain_seconds:.0f} s; it may be stopped now")
        return None
