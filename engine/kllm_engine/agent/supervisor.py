"""Starts one engine, watches it, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_engine.agent.exceptions import DeadError, EndedError, EngineError
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.launch import Launch
from kllm_engine.agent.loads import LoadBook
from kllm_engine.agent.logtail import EngineLog
from kllm_engine.agent.processes import Process, inspect, members
from kllm_engine.agent.readiness import is_ready
from kllm_engine.agent.reports import PluginReports
from kllm_engine.agent.role_switch import SwitchRefusedError, switch_role
from kllm_engine.agent.settings import AgentSettings
from kllm_engine.agent.slot import Slot
from kllm_engine.agent.starter import StartedEngine, Starter, exit_words
from kllm_engine.agent.watchdog import Health, Limits, Observation, Verdict, Watchdog
from kllm_engine.agent.zygote_child import Zygote
from kllm_engine.start.client import ForkedServer

_TICK_SECONDS = 0.25
_OVERSLEPT_SECONDS = 1.0
"""A tick that came so late means that this process stood still, and perhaps the whole machine: silence before proves
nothing."""

_HTTP_CHECK_SECONDS = 2.0
_HTTP_TIMEOUT_SECONDS = 5.0
_EXIT_SECONDS = 10.0
_ARGUMENTS_REFUSED = 2
"""Exit code of a command line that does not know its arguments: a second try would end alike."""

_log = structlog.get_logger(__name__)


class Supervisor:
    """One engine's life.

    Args:
        settings: what to run.
        instance: told of each state.
        slot: waits for the role, if the instance has none.
        reports: what the engine's plugin says.
        loads: says whether the engine has work.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        instance: Instance,
        slot: Slot,
        reports: PluginReports,
        loads: LoadBook,
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._slot = slot
        self._reports = reports
        self._loads = loads
        self._log = EngineLog(settings.log_path, settings.token)
        self._watchdog = Watchdog(
            Limits(
                life=settings.heartbeat_timeout_seconds,
                grace=settings.hang_grace_seconds,
                step=settings.step_timeout_seconds,
            )
        )
        self._trouble: tuple[InstanceState, str] | None = None
        self._before_trouble: tuple[InstanceState, str] | None = None
        self._zygote = Zygote(
            shared=settings.zygote_socket, own=settings.own_zygote_socket, model=str(Path(settings.model))
        )
        self._starter: Starter | None = None
        self._launch: Launch | None = None
        self._parts: list[Process] = []
        self._stopped_since: float | None = None
        self._http_seen = 0.0
        self._listening_since = 0.0
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def give_up(self, message: str) -> None:
        """The engine is broken although it runs: fail the instance and end it."""
        self._instance.move(InstanceState.FAILED, message)
        if not self._given_up.done():
            self._given_up.set_result(message)

    async def switch_role(self, role: Role) -> None:
        """Ask the engine to take a role; see `kllm_engine.agent.role_switch.Switch`."""
        if self._launch is None:
            raise SwitchRefusedError("no server is up yet")
        await switch_role(role, host=self._launch.local_host, port=self._launch.ports.http, token=self._settings.token)

    async def run(self, on_serving: Callable[[StartedEngine], None]) -> None:
        """Start the engine, of a slot once it has its role, and watch it until cancelled. Nothing of it is left then.

        Args:
            on_serving: called once, when the instance serves.

        Raises:
            EngineError: it did not start, was refused, died or hung.
        """
        try:
            role = await self._slot.role(self._zygote, start_seconds=self._settings.start_timeout_seconds)
            started = await self._start(role)
            self._launch = started.launch
            self._serve(started)
            on_serving(started)
            await self._watch_all(started)
        except EngineError as error:
            self._instance.move(InstanceState.FAILED, str(error))
            raise
        finally:
            await asyncio.shield(self._end())

    async def _start(self, role: Role) -> StartedEngine:
        """Start the engine; one that ends by itself gets a second try, with other ports: its own may be taken."""
        try:
            return await self._try(role)
        except EndedError as error:
            if error.status == _ARGUMENTS_REFUSED:
                raise
            _log.warning("the engine ended while it started; trying once more", error=str(error))
        await self._end_server()
        return await self._try(role)

    async def _try(self, role: Role) -> StartedEngine:
        self._starter = Starter(
            self._settings,
            launch=Launch.prepare(self._settings, role),
            zygote=self._zygote,
            instance=self._instance,
            reports=self._reports,
        )
        return await self._starter.run()

    def _serve(self, started: StartedEngine) -> None:
        first = started.server.pid
        self._parts = [part for part in members(first) if part.pid == first or part.is_engine_part]
        self._http_seen = time.monotonic()
        self._instance.facts = started.facts
        self._instance.phases = started.phases
        self._instance.move(InstanceState.SERVING, "")

    async def _watch_all(self, started: StartedEngine) -> None:
        watchers = [
            asyncio.create_task(self._watch_exit(started.server)),
            asyncio.create_task(self._watch_health()),
            asyncio.create_task(self._watch_http(started.launch)),
            asyncio.create_task(self._watch_surrender()),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done:
                watcher.result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch_exit(self, server: ForkedServer) -> None:
        status = await server.wait_exit()
        raise self._dead(f"the engine ended, {exit_words(status)}")

    async def _watch_surrender(self) -> None:
        raise self._dead(await self._given_up)

    async def _watch_health(self) -> None:
        while True:
            slept = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - slept > _OVERSLEPT_SECONDS:
                self._listening_since = self._http_seen = now
                self._stopped_since = None
            verdict = self._watchdog.judge(self._observe(), now=now)
            if verdict.health is Health.LOST:
                raise self._dead(f"hung: {verdict.message}")
            self._follow(verdict)

    def _follow(self, verdict: Verdict) -> None:
        """Withdraw a suspect engine, fail a hung one, and bring either back to what it was when it is well again."""
        present = self._instance.state, self._instance.message
        if self._trouble is not None and present != self._trouble:
            # Someone else has moved it on since.
            self._trouble = self._before_trouble = None
        if verdict.health is Health.WELL:
            if self._before_trouble is not None:
                self._instance.move(*self._before_trouble)
            self._trouble = self._before_trouble = None
            return
        if verdict.health is Health.HUNG:
            trouble = InstanceState.FAILED, f"hung: {verdict.message}"
        elif present[0] is InstanceState.SERVING:
            trouble = InstanceState.STARTING, f"not responding: {verdict.message}"
        else:
            return
        self._before_trouble = self._before_trouble or present
        self._trouble = trouble
        self._instance.move(*trouble)

    def _observe(self) -> Observation:
        now = time.monotonic()
        stopped = self._stopped_part()
        if stopped is None:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return Observation(
            heartbeat_age=min(self._reports.heartbeat_age(), now - self._listening_since),
            loop_age=min(self._reports.loop_age(), now - self._listening_since),
            http_age=now - self._http_seen,
            has_work=bool(self._loads.remaining_requests()),
            stopped_process=None if stopped is None else str(stopped),
            stopped_seconds=0.0 if self._stopped_since is None else now - self._stopped_since,
        )

    def _stopped_part(self) -> Process | None:
        """A part that is stopped by a signal.

        Raises:
            DeadError: a part has ended; the engine's own watch of its children may not notice for long.
        """
        for part in self._parts:
            now = inspect(part.pid)
            if now is None or now.state == "Z":
                raise self._dead(f"the engine's {part} has ended")
            if now.state == "T":
                return now
        return None

    async def _watch_http(self, launch: Launch) -> None:
        while True:
            await asyncio.sleep(_HTTP_CHECK_SECONDS)
            if await is_ready(
                launch.local_host,
                launch.ports.http,
                token=self._settings.token,
                timeout_seconds=_HTTP_TIMEOUT_SECONDS,
            ):
                self._http_seen = time.monotonic()

    async def _end(self) -> None:
        """Leave nothing of the engine, and no zygote of the agent's own."""
        await self._end_server()
        await self._zygote.stop()

    async def _end_server(self) -> None:
        """Kill the engine's process group and wait until it is gone."""
        server = None if self._starter is None else self._starter.server
        if server is None:
            return
        await server.kill()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await server.wait_exit()
        except TimeoutError:
            _log.warning("the zygote did not confirm the engine's end", pid=server.pid)
        _kill_remains(server.pid)
        await server.close()

    def _dead(self, message: str) -> DeadError:
        return DeadError(self._log.under(message))


def _kill_remains(group: int) -> None:
    """Kill what is left of a group whose leader is gone; a zygote that died cannot do it."""
    remains = members(group)
    for process in remains:
        _log.warning("killing a process that outlived its engine", process=str(process))
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
