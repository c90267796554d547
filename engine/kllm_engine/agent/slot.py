"""A place for one engine whose role is told later."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_engine.agent.exceptions import StartError
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.zygote_child import Zygote

_ZYGOTES = 4
"""A zygote that has ended is started again, until so many have: what ends it does so again and again."""

_log = structlog.get_logger(__name__)


class AssumeRefusedError(Exception):
    """The instance stays what it is; the message says why."""


class Slot:
    """Keeps a zygote ready until the instance is told its role.

    Args:
        instance: has a role already if it is no slot.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._leaving = ""
        self._role: asyncio.Future[Role] = asyncio.get_running_loop().create_future()
        if instance.role is not None:
            self._role.set_result(instance.role)

    def assume(self, role: Role) -> InstanceState:
        """Give the instance its role, and return the state that it is in then.

        Raises:
            AssumeRefusedError: it has another role, or will not serve.
        """
        instance = self._instance
        if self._leaving:
            raise AssumeRefusedError(self._leaving)
        if instance.state in {InstanceState.FAILED, InstanceState.DRAINING}:
            raise AssumeRefusedError(f"it is {instance.state}: {instance.message}")
        if instance.role is None:
            instance.role = role
            instance.move(InstanceState.STARTING, f"about to start as {role.value}")
            self._role.set_result(role)
        elif instance.role is not role:
            raise AssumeRefusedError(f"it is a {instance.role.value} instance, and no slot")
        return instance.state

    def leave(self, reason: str) -> None:
        """Assume no role from now on."""
        self._leaving = reason

    async def role(self, zygote: Zygote, *, start_seconds: float) -> Role:
        """The role, for which a slot waits with a zygote: its state is Slot while nothing but the role is missing.

        Raises:
            StartError: a zygote did not get ready in time, or too many have ended.
        """
        if self._role.done():
            return self._role.result()
        for _ in range(_ZYGOTES):
            self._show(InstanceState.STARTING, "phase zygote")
            try:
                async with asyncio.timeout(start_seconds):
                    await zygote.start()
            except TimeoutError:
                raise StartError(f"the zygote was not ready within {start_seconds:.0f} s (--start-timeout)") from None
            self._show(InstanceState.SLOT, "ready to assume a role")
            ended = asyncio.ensure_future(zygote.ended())
            waited: set[asyncio.Future[Any]] = {self._role, ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if self._role.done():
                return self._role.result()
            status = ended.result()
            _log.warning("the zygote of a slot has ended", instance=self._instance.instance_id, status=status)
        raise StartError(f"{_ZYGOTES} zygotes have ended one after the other, the last with status {status}")

    def _show(self, state: InstanceState, message: str) -> None:
        if not self._role.done():
            self._instance.move(state, message)
