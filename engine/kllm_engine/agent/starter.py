"""Brings one engine up, in named phases: zygote, fork, load, ready, check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from kllm_core.fleet import InstanceState
from kllm_engine.agent.exceptions import EndedError, RefusedError, StartError
from kllm_engine.agent.instance import Instance, InstanceFacts, Phase
from kllm_engine.agent.launch import Launch
from kllm_engine.agent.logtail import EngineLog
from kllm_engine.agent.processes import age_seconds
from kllm_engine.agent.readiness import is_ready
from kllm_engine.agent.reports import PluginReports
from kllm_engine.agent.selfcheck import SelfCheck, check
from kllm_engine.agent.settings import AgentSettings
from kllm_engine.agent.zygote_child import Zygote
from kllm_engine.messages import Hello
from kllm_engine.start.client import ForkedServer, ZygoteClient, ZygoteError

_READY_POLL_SECONDS = 0.1
_READY_TIMEOUT_SECONDS = 5.0

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class StartedEngine:
    """An engine that may serve.

    Attributes:
        server: its first process.
        launch: how it was started.
        facts: what its self-check found.
        phases: how long its start took.
    """

    server: ForkedServer
    launch: Launch
    facts: InstanceFacts
    phases: tuple[Phase, ...]


class Starter:
    """One start.

    Attributes:
        server: as soon as it was forked; whoever called owns it, also after a failure.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        launch: Launch,
        zygote: Zygote,
        instance: Instance,
        reports: PluginReports,
    ) -> None:
        self._settings = settings
        self._launch = launch
        self._zygote = zygote
        self._instance = instance
        self._reports = reports
        self._log = EngineLog(settings.log_path, settings.token)
        self._phases: list[Phase] = []
        self.server: ForkedServer | None = None

    async def run(self) -> StartedEngine:
        """Start and check.

        Raises:
            StartError: it ended, or was not ready in time.
            RefusedError: its self-check says that it must not serve.
        """
        limit = self._settings.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._run()
        except TimeoutError as error:
            done = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in self._phases) or "nothing"
            message = f"the engine did not serve within {limit:.0f} s (--start-timeout); done: {done}"
            raise StartError(self._log.under(message)) from error
        except ZygoteError as error:
            raise StartError(str(error)) from error

    async def _run(self) -> StartedEngine:
        self._instance.move(InstanceState.STARTING, "phase zygote")
        began = time.monotonic()
        await self._zygote.start()
        server = self.server = await self._fork()
        # A zygote answers when its imports are done; the server's own age says how much of the wait was the fork.
        waited = time.monotonic() - began
        forked = min(waited, age_seconds(server.pid) or 0.0)
        self._note(Phase("zygote", waited - forked))
        self._note(Phase("fork", forked))
        with self._phase("load"):
            await self._unless_exited(server, self._reports.hello_seen.wait())
        with self._phase("ready"):
            await self._unless_exited(server, self._until_ready())
        hello = self._reports.hello
        if hello is None:
            raise StartError("the engine's plugin sent no hello")
        return StartedEngine(server, self._launch, self._facts(hello, self._checked(hello)), tuple(self._phases))

    async def _fork(self) -> ForkedServer:
        self._settings.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._instance.incarnation = time.time_ns()
        return await ZygoteClient(self._zygote.socket).fork(
            name=self._settings.instance_id,
            args=self._launch.arguments,
            env=self._launch.environment,
            log=self._settings.log_path,
            timeout=self._settings.start_timeout_seconds,
        )

    async def _until_ready(self) -> None:
        while True:
            if await is_ready(
                self._launch.local_host,
                self._launch.ports.http,
                token=self._settings.token,
                timeout_seconds=_READY_TIMEOUT_SECONDS,
            ):
                return
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def _unless_exited(self, server: ForkedServer, wanted: Awaitable[T]) -> T:
        """Wait for something that a server which has ended would never do."""
        waiting = asyncio.ensure_future(wanted)
        ended = asyncio.ensure_future(server.wait_exit())
        try:
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            status = ended.result()
            raise EndedError(self._log.under(f"the engine ended while it started, {exit_words(status)}"), status=status)
        finally:
            waiting.cancel()
            ended.cancel()

    def _checked(self, hello: Hello) -> SelfCheck:
        outcome = check(hello, role=self._launch.role, page_size=self._settings.page_size)
        if outcome.refusals:
            raise RefusedError("the engine must not serve: " + "; ".join(outcome.refusals))
        if outcome.binding_reason:
            _log.warning("no late binding", instance=self._settings.instance_id, reason=outcome.binding_reason)
        return outcome

    def _facts(self, hello: Hello, outcome: SelfCheck) -> InstanceFacts:
        host = self._settings.advertise_host
        return InstanceFacts(
            incarnation=self._instance.incarnation,
            http_address=f"{host}:{self._launch.ports.http}",
            bootstrap_host=host,
            bootstrap_port=self._launch.ports.bootstrap,
            page_size=hello.page_size,
            kv_type=hello.kv_type,
            context_tokens=hello.request_tokens,
            kv_total_tokens=hello.max_total_num_tokens,
            max_running_requests=hello.max_running_requests,
            engine_version=hello.engine_version,
            bindings=outcome.bindings,
            binding_reason=outcome.binding_reason,
            pace=hello.pace,
            flip_obstacle=self._launch.flip_obstacle or hello.flip_obstacle,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._instance.move(InstanceState.STARTING, f"phase {name}")
        began = time.monotonic()
        yield
        self._note(Phase(name, time.monotonic() - began))

    def _note(self, phase: Phase) -> None:
        self._phases.append(phase)
        _log.info("start phase", instance=self._settings.instance_id, phase=phase.name, seconds=round(phase.seconds, 3))


def exit_words(status: int) -> str:
    """An exit status for people."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
