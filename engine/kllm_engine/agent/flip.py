"""Switches the role of an instance that has run empty."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_engine.agent.books import Books
from kllm_engine.agent.drain import DrainWatch
from kllm_engine.agent.instance import Instance, InstanceFacts
from kllm_engine.agent.reports import PluginReports
from kllm_engine.agent.role_switch import Switch, SwitchBrokenError, SwitchRefusedError
from kllm_engine.agent.selfcheck import check
from kllm_engine.messages import Hello

_HELLO_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class FlipRefusedError(Exception):
    """The instance stays what it is; the message says why."""


class FlipBrokenError(Exception):
    """The engine is neither one nor the other: the instance has failed."""


@dataclass(frozen=True)
class Flipped:
    """A switch that was made.

    Attributes:
        seconds: from the question to the engine until it serves the new role; 0 when it had it already.
    """

    seconds: float
    incarnation: int


class RoleFlip:
    """Switches one instance's role, once at a time.

    Args:
        instance: whose role it is.
        drain: says whether it is empty.
        reports: bring the engine's introduction in its new role.
        books: are emptied with the old role.
        switch: asks the engine.
        give_up: to be called when the engine is broken.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        drain: DrainWatch,
        reports: PluginReports,
        books: Books,
        switch: Switch,
        give_up: Callable[[str], None],
    ) -> None:
        self._instance = instance
        self._drain = drain
        self._reports = reports
        self._books = books
        self._switch = switch
        self._give_up = give_up
        self._switching: asyncio.Task[Flipped] | None = None
        self._switching_to: Role | None = None

    async def run(self, role: Role) -> Flipped:
        """Make the instance serve `role`; who asks for it again meanwhile waits for the same end.

        Raises:
            FlipRefusedError: it is not drained, not empty, cannot switch, or its engine refused. It is as before.
            FlipBrokenError: the engine failed half way; the instance has failed.
        """
        facts = self._instance.facts
        if facts is not None and self._instance.role is role and self._instance.state is InstanceState.SERVING:
            return Flipped(0.0, facts.incarnation)
        if self._switching is not None and not self._switching.done() and self._switching_to is role:
            return await asyncio.shield(self._switching)
        facts = self._checked(role, facts)
        began = time.monotonic()
        self._instance.move(InstanceState.STARTING, f"switching to {role.value}")
        # The engine is asked to the end, even when whoever asked for it has gone.
        self._switching_to = role
        self._switching = asyncio.create_task(self._run(role, facts, began))
        return await asyncio.shield(self._switching)

    async def _run(self, role: Role, facts: InstanceFacts, began: float) -> Flipped:
        try:
            await self._switch(role)
            return self._serve(role, facts, await self._hello(role, began), began)
        except SwitchRefusedError as error:
            self._instance.move(InstanceState.DRAINING, f"still {role.other.value}: {error}")
            raise FlipRefusedError(str(error)) from error
        except (SwitchBrokenError, FlipBrokenError) as error:
            message = f"the switch to {role.value} failed half way: {error}"
            self._give_up(message)
            raise FlipBrokenError(message) from error

    def _checked(self, role: Role, facts: InstanceFacts | None) -> InstanceFacts:
        if facts is None:
            raise FlipRefusedError("no server is up yet")
        if self._switching is not None and not self._switching.done():
            raise FlipRefusedError("a switch is going on")
        if facts.flip_obstacle:
            raise FlipRefusedError(f"it cannot switch roles: {facts.flip_obstacle}")
        if self._instance.state is not InstanceState.DRAINING:
            raise FlipRefusedError(f"it must be drained first; it is {self._instance.state}")
        if self._instance.role is role:
            raise FlipRefusedError(f"it is a {role.value} instance, and is draining")
        remaining = self._drain.remaining()
        if remaining is None:
            raise FlipRefusedError("it has not told yet whether it is empty")
        if remaining:
            raise FlipRefusedError(f"it is not empty: {remaining} requests remain; drain it to the end first")
        return facts

    async def _hello(self, role: Role, since: float) -> Hello:
        """The engine's introduction in its new role, which it sends before it answers."""
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                return await self._reports.next_hello(role.value, since)
        except TimeoutError:
            raise FlipBrokenError(f"its plugin said nothing of the new role for {_HELLO_SECONDS:g} s") from None

    def _serve(self, role: Role, facts: InstanceFacts, hello: Hello, began: float) -> Flipped:
        outcome = check(hello, role=role, page_size=facts.page_size)
        if outcome.refusals:
            raise FlipBrokenError("it must not serve: " + "; ".join(outcome.refusals))
        incarnation = time.time_ns()
        self._books.clear(role)
        self._drain.end()
        self._instance.role = role
        self._instance.incarnation = incarnation
        self._instance.facts = dataclasses.replace(
            facts,
            incarnation=incarnation,
            kv_total_tokens=hello.max_total_num_tokens,
            max_running_requests=hello.max_running_requests,
            context_tokens=hello.request_tokens,
            bindings=outcome.bindings,
            binding_reason=outcome.binding_reason,
            flip_obstacle=hello.flip_obstacle,
        )
        self._instance.move(InstanceState.SERVING, "")
        self._books.cache.changes.notify()
        seconds = time.monotonic() - began
        _log.info("role switched", instance=self._instance.instance_id, role=role.value, seconds=round(seconds, 3))
        return Flipped(seconds, incarnation)
