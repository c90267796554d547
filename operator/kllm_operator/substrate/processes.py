"""Instances as processes of this machine: one zygote, an agent per instance, one router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kllm_core.authentication import read_token_file
from kllm_core.fleet import InstanceState
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.base import Observed, Substrate
from kllm_operator.substrate.child import Child
from kllm_operator.substrate.children import Children
from kllm_operator.substrate.exceptions import ChildFailedError, StepRefusedError, SubstrateError
from kllm_operator.substrate.programs import Commands, Programs, RouterAddress
from kllm_operator.substrate.rundir import RunDirectory, write_atomically

Observer = Callable[[str, str, dict[str, Any]], None]
"""Called with name and kind of a process and an event that it printed."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which waiting ends.

    Attributes:
        model: a download of a large model over a slow line.
        serving: from the start of an agent until its engine serves; covers compilation and loading of large weights.
        router: from its start until it listens.
        stop_one: grace of one instance; it is drained before if that matters.
        stop_all: of the whole run. Short, because people wait for it.
    """

    model: float = 6 * 3600.0
    serving: float = 1800.0
    router: float = 120.0
    stop_one: float = 5.0
    stop_all: float = 2.2


@dataclass
class _Instance:
    id: str
    role: Role
    child: Child
    began: float
    state: InstanceState = InstanceState.STARTING
    agent: str | None = None
    message: str = "the agent starts"
    start: dict[str, Any] = field(default_factory=dict)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


_REACHABLE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def _reachable(address: str) -> str:
    """Where to connect to for a server that listens there."""
    host, _, port = address.rpartition(":")
    return f"{_REACHABLE.get(host, host)}:{port}"


def _ignore(name: str, kind: str, event: dict[str, Any]) -> None:
    del name, kind, event


class ProcessSubstrate(Substrate):
    """A service on this machine. An asynchronous context: it owns the run directory inside and leaves nothing behind.

    Args:
        service: what is served.
        programs: what is executed.
        timeouts: of everything that waits.
        observer: hears everything that children tell.
    """

    def __init__(
        self,
        service: InferenceService,
        *,
        programs: Programs | None = None,
        timeouts: Timeouts | None = None,
        observer: Observer = _ignore,
    ) -> None:
        self.run = RunDirectory(service.name)
        self._service = service
        self._commands = Commands(programs or Programs(), service, self.run)
        self._timeouts = timeouts or Timeouts()
        self._observer = observer
        self._instances: dict[str, _Instance] = {}
        self._ordinals = dict.fromkeys(Role, 0)
        self._model: Path | None = None
        self._children: Children | None = None
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
        found: asyncio.Future[Path] = asyncio.get_running_loop().create_future()

        def notice(event: dict[str, Any]) -> None:
            if isinstance(event.get("path"), str) and not found.done():
                found.set_result(Path(event["path"]))

        child = self.children.spawn("model", "model", self._commands.model(cache), on_event=notice)
        await self._wait(child, child.wait(), seconds=self._timeouts.model)
        if child.exit_status != 0 or not found.done():
            raise child.failed(None if child.exit_status != 0 else "ended without naming the model's folder")
        await self.children.stop(child, grace_seconds=0)
        self._model = found.result()
        return self._model

    async def start_router(self, address: RouterAddress) -> str:
        """Start the router and return its URL once it listens."""
        listening: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def notice(event: dict[str, Any]) -> None:
            if event["event"] == "listening" and not listening.done():
                listening.set_result(event)

        arguments = self._commands.router(address, self._needed_model())
        child = self.children.spawn("router-0", "router", arguments, on_event=notice)
        event = await self._wait(child, listening, seconds=self._timeouts.router)
        url = f"http://{_reachable(str(event.get('http')))}"
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
        self._instances[instance_id] = _Instance(instance_id, role, child, time.monotonic())
        return instance_id

    async def serving(self, instance_id: str) -> dict[str, Any]:
        """Wait until an instance serves; returns what it told about its start.

        Raises:
            ChildFailedError: it failed, or did not serve in time.
        """
        instance = self._get(instance_id)
        await self._wait(instance.child, instance.settled.wait(), seconds=self._timeouts.serving)
        if instance.state is InstanceState.FAILED:
            raise instance.child.failed()
        return instance.start

    async def failure(self) -> ChildFailedError:
        """Wait for the first process that ends by itself."""
        return await self.children.failure()

    async def cancel(self, instance_id: str) -> None:
        """See `Substrate.cancel`."""
        instance = self._get(instance_id)
        if instance.state not in {InstanceState.STARTING, InstanceState.FAILED}:
            raise StepRefusedError("AlreadyServing", f"{instance_id} is {instance.state}; drain and stop it instead")
        self._withdraw(instance)
        await self.children.stop(instance.child, grace_seconds=0)

    async def drain(self, instance_id: str, *, deadline_seconds: float) -> bool:
        """See `Substrate.drain`."""
        from kllm_operator.substrate import agentcalls  # noqa: PLC0415 - gRPC costs `kllm --help` its speed

        instance = self._get(instance_id)
        if instance.agent is None or instance.state is not InstanceState.SERVING:
            raise StepRefusedError("NotServing", f"{instance_id} is {instance.state}, so there is nothing to drain")
        instance.state, instance.message = InstanceState.DRAINING, "finishes what it has"
        return await agentcalls.drain(instance.agent, self._token, deadline_seconds=deadline_seconds)

    async def stop(self, instance_id: str) -> None:
        """See `Substrate.stop`."""
        instance = self._get(instance_id)
        self._withdraw(instance)
        await self.children.stop(instance.child, grace_seconds=self._timeouts.stop_one)

    async def flip(self, instance_id: str, to: Role) -> None:
        """See `Substrate.flip`."""
        from kllm_operator.substrate import agentcalls  # noqa: PLC0415 - gRPC costs `kllm --help` its speed

        instance = self._get(instance_id)
        if instance.agent is None or instance.state is not InstanceState.DRAINING:
            raise StepRefusedError("NotDrained", f"{instance_id} is {instance.state}; drain it before its role changes")
        await agentcalls.switch_role(instance.agent, self._token, to)
        instance.role, instance.state, instance.message = to, InstanceState.SERVING, "switched its role"
        self._write_fleet()

    async def observe(self) -> Sequence[Observed]:
        """See `Substrate.observe`."""
        now = time.monotonic()
        return [
            Observed(item.id, item.role, item.state, item.agent, item.message, now - item.began)
            for _, item in sorted(self._instances.items())
        ]

    async def _wait(self, child: Child, what: Any, *, seconds: float) -> Any:
        """Wait for something that a child will do, for its end, or for the timeout."""
        waiting = asyncio.ensure_future(what)
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({waiting, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise child.failed(None if ended.done() else f"is not ready after {seconds:.0f} s")
        finally:
            waiting.cancel()
            ended.cancel()

    def _told(self, instance_id: str, event: dict[str, Any]) -> None:
        instance = self._instances[instance_id]
        match event["event"]:
            case "listening":
                instance.agent, instance.message = str(event.get("agent")), "the engine starts"
                self._write_fleet()
            case "serving":
                instance.state, instance.message, instance.start = InstanceState.SERVING, "serves", event
                instance.settled.set()
            case "failed":
                instance.state, instance.message = InstanceState.FAILED, str(event.get("message") or "failed")
                instance.settled.set()

    def _noticed(self, child: Child, event: dict[str, Any]) -> None:
        instance = self._instances.get(child.name)
        if event["event"] == "ended" and instance is not None:
            if not child.stopping and instance.state is not InstanceState.FAILED:
                instance.message = child.failed().why
            instance.state = InstanceState.FAILED
            instance.settled.set()
            self._write_fleet()
        self._observer(child.name, child.kind, event)

    def _withdraw(self, instance: _Instance) -> None:
        del self._instances[instance.id]
        self._write_fleet()

    def _write_fleet(self) -> None:
        listed = [
            {"id": item.id, "role": item.role.value, "agent": item.agent}
            for _, item in sorted(self._instances.items())
            if item.agent is not None and item.child.running
        ]
        document = {"version": 1, "service": self._service.name, "instances": listed}
        write_atomically(self.run.fleet_file, json.dumps(document, indent=1) + "\n")

    def _get(self, instance_id: str) -> _Instance:
        try:
            return self._instances[instance_id]
        except KeyError:
            raise StepRefusedError("NoSuchInstance", f"there is no instance {instance_id!r}") from None

    def _needed_model(self) -> Path:
        if self._model is None:
            raise SubstrateError("the model is not resolved yet")
        return self._model

    def _leave(self) -> None:
        try:
            self.run.clean()
        finally:
            self.run.release()
