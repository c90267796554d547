"""Puts one agent together and runs it to its end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Collection

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kllm_core.contracts.engine.v1 import engine_pb2_grpc
from kllm_core.fleet import InstanceState
from kllm_core.termination import tell_why
from kllm_engine.agent.authentication import TokenInterceptor
from kllm_engine.agent.books import Books
from kllm_engine.agent.cache.book import CacheBook
from kllm_engine.agent.cache.follower import CacheFollower
from kllm_engine.agent.changes import wait_set
from kllm_engine.agent.drain import DrainWatch
from kllm_engine.agent.exceptions import EngineError, SettingsError
from kllm_engine.agent.flip import RoleFlip
from kllm_engine.agent.forwarding import LogForwarder
from kllm_engine.agent.helpers import kept_up
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.launch import Launch
from kllm_engine.agent.loads import LoadBook
from kllm_engine.agent.plugin_link import PluginLink
from kllm_engine.agent.reports import PluginReports
from kllm_engine.agent.requests import RequestBook
from kllm_engine.agent.service import SERVICE_NAME, EngineAgentService
from kllm_engine.agent.settings import AgentSettings
from kllm_engine.agent.slot import Slot
from kllm_engine.agent.starter import StartedEngine
from kllm_engine.agent.supervisor import Supervisor

_LAST_WORDS_SECONDS = 0.5
"""Time for subscribers to hear that the instance failed, or is gone."""

LIVENESS = "liveness"
"""Health service that serves as long as the agent answers at all."""

READINESS = "readiness"
"""Health service that serves while the instance does."""

_WAKE_SECONDS = 60.0
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", 256),
]

_log = structlog.get_logger(__name__)


class Agent:
    """One agent, from its start to its exit code.

    Args:
        settings: what to run.
        announce: tells the starter of the agent what happens, one JSON object at a time.
    """

    def __init__(self, settings: AgentSettings, *, announce: Callable[[dict[str, object]], None]) -> None:
        self._settings = settings
        self._announce = announce
        for role in settings.roles:
            # What the engine cannot be given is refused before anything starts.
            Launch.prepare(settings, role)
        self._instance = Instance(
            settings.instance_id, service=settings.service, model_name=settings.model_name, role=settings.role
        )
        self._loads = LoadBook(self._instance)
        self._books = Books(self._loads, RequestBook(), CacheBook(settings.page_size))
        self._drain = DrainWatch(self._instance, self._loads)
        self._reports = PluginReports(instance=self._instance, loads=self._loads, requests=self._books.requests)
        self._health = health.aio.HealthServicer()
        self._started: asyncio.Future[StartedEngine] = asyncio.get_running_loop().create_future()
        self._slot = Slot(self._instance)
        self._supervisor = Supervisor(
            settings, instance=self._instance, slot=self._slot, reports=self._reports, loads=self._loads
        )
        self._flip = RoleFlip(
            self._instance,
            drain=self._drain,
            reports=self._reports,
            books=self._books,
            switch=self._supervisor.switch_role,
            give_up=self._supervisor.give_up,
        )

    async def run(self) -> int:
        """Run until the engine fails (1) or SIGTERM or SIGINT (0); a second signal ends it without a drain."""
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        link = PluginLink(self._settings.plugin_socket, self._reports.handle)
        server = self._grpc_server()
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._tell_health()
        self._announce({"event": "listening", "agent": await _listen(server, self._settings.listen)})
        works = {"health": self._follow_health, "cache events": self._follow_cache, "log": self._forward_log}
        hearing = asyncio.create_task(link.run())
        helpers = [hearing, *(asyncio.create_task(kept_up(name, work)) for name, work in works.items())]
        try:
            return await self._run_engine(stop, hurry, hearing)
        finally:
            await self._health.enter_graceful_shutdown()
            await server.stop(_LAST_WORDS_SECONDS)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            for path in self._settings.cache_sockets:
                path.unlink(missing_ok=True)

    async def _run_engine(self, stop: asyncio.Event, hurry: asyncio.Event, hearing: asyncio.Task[None]) -> int:
        """Until the engine fails, or is as good as that since nobody hears of it any more, or a signal comes."""
        engine = asyncio.create_task(self._supervisor.run(self._on_serving))
        stopping = asyncio.create_task(stop.wait())
        try:
            parts = (engine, hearing)
            await asyncio.wait({*parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not any(part.done() for part in parts):
                await self._drain_before_stop(parts, hurry)
            failed = next((part for part in parts if part.done()), None)
            return 0 if failed is None else self._failed(failed)
        finally:
            stopping.cancel()
            engine.cancel()
            await asyncio.gather(engine, stopping, return_exceptions=True)

    async def _drain_before_stop(self, parts: Collection[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        self._slot.leave("the agent was told to stop")
        if self._instance.state not in {InstanceState.SERVING, InstanceState.DRAINING}:
            return
        self._drain.begin("the agent was told to stop")
        if self._settings.drain_seconds > 0:
            drained, hurried = asyncio.create_task(self._drained()), asyncio.create_task(hurry.wait())
            await asyncio.wait({*parts, drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
            hurried.cancel()

    async def _drained(self) -> None:
        async for progress in self._drain.follow(self._settings.drain_seconds):
            _log.info("draining", instance=self._settings.instance_id, remaining=progress.remaining)

    def _failed(self, part: asyncio.Task[None]) -> int:
        error = part.exception()
        if not isinstance(error, EngineError):
            raise error or RuntimeError("the engine's watch ended without a reason")
        _log.error("the engine failed", instance=self._settings.instance_id, message=str(error))
        self._announce({"event": "failed", "message": str(error)})
        tell_why(str(error))
        return 1

    def _on_serving(self, started: StartedEngine) -> None:
        phases = [{"name": phase.name, "seconds": round(phase.seconds, 3)} for phase in started.phases]
        seconds = round(sum(phase.seconds for phase in started.phases), 3)
        self._announce({"event": "serving", "seconds": seconds, "phases": phases})
        self._started.set_result(started)

    async def _follow_cache(self) -> None:
        launch = (await self._started).launch
        if launch.cache_events is None or launch.cache_replay is None:
            return
        follower = CacheFollower(self._books.cache, endpoint=launch.cache_events, replay_endpoint=launch.cache_replay)
        await follower.run()

    async def _forward_log(self) -> None:
        if self._settings.forward_engine_log:
            log = LogForwarder(self._settings.log_path, secret=self._settings.token, out=sys.stderr.buffer)
            await log.run()

    async def _follow_health(self) -> None:
        with self._instance.changes.subscribe() as changed:
            while True:
                await self._tell_health()
                await wait_set(changed, _WAKE_SECONDS)

    async def _tell_health(self) -> None:
        serving = self._instance.state is InstanceState.SERVING
        status = health_pb2.HealthCheckResponse.SERVING if serving else _NOT_SERVING
        for service in ("", SERVICE_NAME, READINESS):
            await self._health.set(service, status)

    def _grpc_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[TokenInterceptor(self._settings.token)], options=_OPTIONS)
        service = EngineAgentService(
            instance=self._instance, books=self._books, drain=self._drain, flip=self._flip, slot=self._slot
        )
        engine_pb2_grpc.add_EngineAgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server


_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _listen(server: grpc.aio.Server, address: str) -> str:
    host, _, _ = address.rpartition(":")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise SettingsError(f"--listen {address}: {error}") from error
    if port == 0:
        raise SettingsError(f"--listen {address}: the address cannot be bound")
    await server.start()
    return f"{host}:{port}"


def announce_on_stdout(event: dict[str, object]) -> None:
    """One line of JSON; a starter that no longer reads is no reason to fail."""
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _log.warning("nobody reads this agent's stdout", told=event.get("event"))
