"""Instances as processes of this machine: one zygote, an agent per instance, one router."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from kllm_core.authentication import read_token_file
from kllm_core.fleet import InstanceState
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.base import Observed, Substrate
from kllm_operator.substrate.child import Child
from kllm_operator.substrate.children import Children
from kllm_operator.substrate.exceptions import ChildFailedError, StepRefusedError, SubstrateError
from kllm_operator.substrate.instance import ProcessInstance, Timeouts
from kllm_operator.substrate.ongoing import Ongoing
from kllm_operator.substrate.programs import Commands, Programs, RouterAddress
from kllm_operator.substrate.rundir import RunDirectory, write_atomically
from kllm_operator.substrate.shared import reachable, resolve_model, start_router, wait_for_child

Observer = Callable[[str, str, dict[str, Any]], None]
"""Called with name and kind of a process and an event that it printed."""

_KEPT_LOGS = 20
"""Instances that are gone and whose logs stay: enough to find a cause, however often one is replaced."""


_log = structlog.get_logger(__name__)


def _ignore(name: str, kind: str, event: dict[str, Any]) -> None:
    del name, kind, event


class ProcessSubstrate(Substrate):
    """A service on this machine. An asynchronous context: it owns the run directory inside and leaves nothing behind.

    Args:
        service: what is served.
        programs: what is executed.
        timeouts: of everything that waits.
        observer: hears everything that children tell.
        pace: how long the engines' steps are made to last; None leaves them as they are.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        service: InferenceService,
        *,
        programs: Programs | None = None,
        timeouts: Timeouts | None = None,
        observer: Observer = _ignore,
        pace: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.run = RunDirectory(service.name)
        self._service = service
        self._commands = Commands(programs or Programs(), service, self.run, pace)
        self._timeouts = timeouts or Timeouts()
        self._observer = observer
        self._clock = clock
        self._ongoing = Ongoing()
        self._gone: deque[str] = deque()
        self._instances: dict[str, ProcessInstance] = {}
        self._ordinals = dict.fromkeys(Role, 0)
        self._model: Path | None = None
        self._children: Children | None = None
        self._fleet_is_old = False
        self._token = ""

    async def __aenter__(self) -> Self:
        """Own the run directory; nothing runs yet.

        Raises:
            AlreadyRunningError: the service runs already.
            RunDirectoryError: the run directory cannot be used.
        """
        most = max(self._service.spec.prefill.max_replicas, self._service.spec.decode.max_replicas)
        longest = f"{self._service.name}-{Role.PREFILL}-{most:04}.plugin.sock"
        self.run.claim(longest_socket_name=longest)
        try:
            state = self.run.begin(model=self._service.spec.model.name, now=time.time())
            self._token = read_token_file(self.run.token_file)
            self._children = Children(self.run, state.run_id, on_change=self._noticed)
            self._write_fleet()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything and give the run directory up."""
        self.run.update(phase="Stopping")
        stopping = asyncio.ensure_future(self.children.stop_all(budget_seconds=self._timeouts.stop_all))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            # Whoever is cancelled while stopping is in a hurry: no more grace, but still an end of everything.
            self.children.kill_all()
            await stopping
            raise
        finally:
            await self._ongoing.end()
            self._leave()

    @property
    def children(self) -> Children:
        """Processes of the run."""
        if self._children is None:
            raise SubstrateError("the substrate is not open")
        return self._children

    def preload(self) -> None:
        """Start the zygote, which loads the engine's code once; instances wait for it where they need it."""
        self.children.spawn("zygote", "zygote", self._commands.zygote())

    async def resolve_model(self, cache: Path) -> Path:
        """Make the service's model available; instances started later load it."""
        self._model = await resolve_model(self.children, self._commands.model(cache), seconds=self._timeouts.model)
        return self._model

    async def start_router(self, address: RouterAddress) -> str:
        """Start the router and return its URL once it listens."""
        arguments = self._commands.router(address, self._needed_model())
        event = await start_router(self.children, arguments, seconds=self._timeouts.router)
        url = f"http://{reachable(str(event.get('http')))}"
        self.run.update(url=url, grpc=event.get("grpc"))
        return url

    async def start(self, role: Role, *, source: StartFrom = StartFrom.NEW) -> str:
        """Start one more agent. There are no slots or gates on one machine: every start is a new one."""
        del source
        instance_id = f"{self._service.name}-{role}-{self._ordinals[role]}"
        self._ordinals[role] += 1
        arguments = self._commands.agent(instance_id, role, self._needed_model())
        child = self.children.spawn(
            instance_id, role.value, arguments, on_event=lambda event: self._told(instance_id, event)
        )
        now = self._clock()
        self._instances[instance_id] = ProcessInstance(instance_id, role, child, now, now)
        self._changed()
        return instance_id

    async def add_slot(self, role: Role) -> str:
        """See `Substrate.add_slot`. Processes of one machine share its memory and its zygote: none is kept ready."""
        raise StepRefusedError("NoSlots", f"there are no slots on one machine; set {role}.slots to 0")

    async def serving(self, instance_id: str) -> dict[str, Any]:
        """Wait until an instance serves; returns what it told about its start.

        Raises:
            ChildFailedError: it failed, or did not serve in time.
        """
        instance = self._get(instance_id)
        await wait_for_child(instance.child, instance.settled.wait(), seconds=self._timeouts.serving)
        if instance.state is InstanceState.FAILED:
            raise instance.child.failed()
        return instance.start

    async def failure(self, *kinds: str) -> ChildFailedError:
        """Wait for the first process of some kinds, or of any, that ends by itself."""
        return await self.children.failure(*kinds)

    async def cancel(self, instance_id: str) -> None:
        """See `Substrate.cancel`."""
        instance = self._known(instance_id)
        if instance is None:
            return
        if instance.state not in {InstanceState.STARTING, InstanceState.FAILED}:
            raise StepRefusedError("AlreadyServing", f"{instance_id} is {instance.state}; drain and stop it instead")
        await self._end(instance, grace_seconds=0)

    async def drain(self, instance_id: str, *, deadline_seconds: float, to: Role | None = None) -> bool:
        """See `Substrate.drain`."""
        instance = self._get(instance_id)
        states = {InstanceState.SERVING, InstanceState.DRAINING}
        if instance.agent is None or instance.state not in states or instance.ending:
            raise StepRefusedError("NotServing", f"{instance_id} is {instance.state}, so there is nothing to drain")
        if instance.state is InstanceState.SERVING:
            instance.draining_to = to
            self._move(instance, InstanceState.DRAINING, "finishes what it has")
        empty = await self._ongoing.join(
            "drain", instance_id, lambda: self._drain(instance, str(instance.agent), deadline_seconds)
        )
        return bool(empty)

    async def stop(self, instance_id: str) -> None:
        """See `Substrate.stop`."""
        instance = self._known(instance_id)
        if instance is not None:
            await self._end(instance, grace_seconds=self._timeouts.stop_one)

    async def flip(self, instance_id: str, to: Role) -> float:
        """See `Substrate.flip`."""
        instance = self._get(instance_id)
        if instance.role is to and instance.state is InstanceState.SERVING:
            return 0.0
        if not self._ongoing.has("flip", instance_id):
            if instance.agent is None or not instance.drained or instance.ending:
                raise StepRefusedError(
                    "NotDrained", f"{instance_id} is {instance.state}; drain it before its role changes"
                )
            instance.role = to
            self._move(instance, InstanceState.STARTING, "switches its role")
        seconds = await self._ongoing.join("flip", instance_id, lambda: self._switch(instance, str(instance.agent), to))
        return float(seconds)

    async def observe(self) -> Sequence[Observed]:
        """See `Substrate.observe`."""
        if self._fleet_is_old or not self.run.fleet_file.exists():
            self._write_fleet()
        now, ready = self._clock(), self._timeouts.serving
        return [item.observed(now=now, ready_seconds=ready) for _, item in sorted(self._instances.items())]

    async def _drain(self, instance: ProcessInstance, agent: str, deadline_seconds: float) -> bool:
        from kllm_operator.substrate import agentcalls  # noqa: PLC0415 - gRPC costs `kllm --help` its speed

        try:
            instance.drained = await agentcalls.drain(agent, self._token, deadline_seconds=deadline_seconds)
        finally:
            instance.overdue = not instance.drained
            self._changed()
        return instance.drained

    async def _switch(self, instance: ProcessInstance, agent: str, to: Role) -> float:
        from kllm_operator.substrate import agentcalls  # noqa: PLC0415 - gRPC costs `kllm --help` its speed

        try:
            seconds = await agentcalls.switch_role(agent, self._token, to)
        except SubstrateError as error:
            if instance.state is InstanceState.STARTING:
                instance.role, instance.draining_to = to.other, None
                self._move(instance, InstanceState.DRAINING, str(error))
            raise
        if instance.state is InstanceState.STARTING:
            instance.drained = instance.overdue = False
            self._move(instance, InstanceState.SERVING, "switched its role")
            self._write_fleet()
        return seconds

    async def _end(self, instance: ProcessInstance, *, grace_seconds: float) -> None:
        """End an instance; it is told of until its process is gone, since it holds memory until then."""
        instance.ending = True
        self._write_fleet()
        self._changed()
        await self._ongoing.join("end", instance.id, lambda: self._ended(instance, grace_seconds))

    async def _ended(self, instance: ProcessInstance, grace_seconds: float) -> None:
        await self.children.stop(instance.child, grace_seconds=grace_seconds)
        del self._instances[instance.id]
        self._changed()
        self._gone.append(instance.id)
        if len(self._gone) > _KEPT_LOGS:
            self.run.remove_logs(self._gone.popleft())

    def _move(self, instance: ProcessInstance, state: InstanceState, message: str) -> None:
        instance.move(state, message, now=self._clock())
        self._changed()

    def _told(self, instance_id: str, event: dict[str, Any]) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            return  # its start was given up
        match event["event"]:
            case "listening":
                instance.agent, instance.message = str(event.get("agent")), "the engine starts"
                self._write_fleet()
                self._changed()
            case "serving" if instance.state is InstanceState.STARTING:
                instance.start = event
                self._move(instance, InstanceState.SERVING, "serves")
            case "failed":
                self._move(instance, InstanceState.FAILED, str(event.get("message") or "failed"))

    def _noticed(self, child: Child, event: dict[str, Any]) -> None:
        instance = self._instances.get(child.name)
        if event["event"] == "ended" and instance is not None:
            failed_already = child.stopping or instance.state is InstanceState.FAILED
            self._move(instance, InstanceState.FAILED, instance.message if failed_already else child.failed().why)
            self._write_fleet()
        self._observer(child.name, child.kind, event)

    def _write_fleet(self) -> None:
        listed = [
            {"id": item.id, "role": item.role.value, "agent": item.agent}
            for _, item in sorted(self._instances.items())
            if item.agent is not None and item.child.running and not item.ending
        ]
        document = {"version": 1, "service": self._service.name, "instances": listed}
        try:
            write_atomically(self.run.fleet_file, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            # A full disk must not keep instances from being replaced; the next look tries again.
            _log.error("FleetNotWritten", path=str(self.run.fleet_file), why=error.strerror)
            self._fleet_is_old = True
        else:
            self._fleet_is_old = False

    def _get(self, instance_id: str) -> ProcessInstance:
        try:
            return self._instances[instance_id]
        except KeyError:
            raise StepRefusedError("NoSuchInstance", f"there is no instance {instance_id!r}") from None

    def _known(self, instance_id: str) -> ProcessInstance | None:
        """The instance, or None for one that is gone.

        Raises:
            StepRefusedError: there never was one of that id.
        """
        _, _, ordinal = instance_id.rpartition("-")
        if instance_id not in self._instances and instance_id in {
            f"{self._service.name}-{role}-{ordinal}"
            for role, following in self._ordinals.items()
            if ordinal.isdecimal() and int(ordinal) < following
        }:
            return None
        return self._get(instance_id)

    def _needed_model(self) -> Path:
        if self._model is None:
            raise SubstrateError("the model is not resolved yet")
        return self._model

    def _leave(self) -> None:
        try:
            self.run.clean()
        finally:
            self.run.release()
