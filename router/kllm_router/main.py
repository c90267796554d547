"""`kllm-router`: the OpenAI and gRPC frontend of one service."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import orjson
import structlog
import uvloop

from kllm_core.lifetime import die_with_parent
from kllm_core.logs import configure_logs
from kllm_core.objectives import Role
from kllm_router import arguments as command_line
from kllm_router.arguments import ArgumentError, Arguments, FleetFile, FleetPods
from kllm_router.discovery.exceptions import AccessError
from kllm_router.discovery.file import watch_fleet_file
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.frontend.application import RouterApplication
from kllm_router.frontend.grpc_server import GrpcServer
from kllm_router.frontend.grpc_service import RouterService
from kllm_router.frontend.http_server import HttpServer
from kllm_router.frontend.openai import OpenAiPreparer
from kllm_router.frontend.tokenizer import ModelFilesError
from kllm_router.limits import RequestLimits
from kllm_router.metrics import DiscoveryMetrics, RouterMetrics, SharedMetrics
from kllm_router.proxy.fleet_view import AgentFleetView, FleetViewSettings
from kllm_router.proxy.pairing import Pairing
from kllm_router.proxy.upstream import EngineClient
from kllm_router.service_levels import ServiceLevels

if TYPE_CHECKING:
    from pathlib import Path

    from kllm_router.shared.address import RedisAddress
    from kllm_router.shared.redis import RedisShares

TOKENIZER_COMMAND = "tokenizer"
_BAD_CONFIGURATION = 2

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `kllm-router`; exits with 0 after SIGTERM, 2 when it cannot be started as asked, 1 when it broke."""
    # Until the loop has its own handlers, being told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [TOKENIZER_COMMAND]:
        from kllm_router.tokenizer_command import run as run_tokenizer  # noqa: PLC0415

        sys.exit(run_tokenizer(argv[1:]))
    try:
        arguments = command_line.parse(argv)
        if arguments.parent_pid is not None:
            die_with_parent(arguments.parent_pid)
        configure_logs(getattr(logging, arguments.log_level.upper()))
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every call
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(run(arguments))
    except (ArgumentError, AccessError, ModelFilesError) as error:
        print(f"kllm-router: {error}", file=sys.stderr)  # noqa: T201  logs may not be set up yet
        sys.exit(_BAD_CONFIGURATION)
    sys.exit(code)


async def run(arguments: Arguments) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ArgumentError: an address cannot be had.
        AccessError: it is not known how to reach the API server.
        ModelFilesError: the tokenizer's folder cannot be used.
    """
    router = Router(arguments)
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # The second one ends what the first one lets finish.
        loop.add_signal_handler(number, _next, stop, now)
    try:
        event = await router.start()
        # What is loaded by now stays; walking it again and again would only stall streams.
        gc.collect()
        gc.freeze()
        print(orjson.dumps(event).decode(), flush=True)  # noqa: T201  read by the process that started this one
        return await router.serve(stop, now)
    finally:
        await router.close()


class Router:
    """All parts of one router, wired."""

    def __init__(self, arguments: Arguments) -> None:
        settings = arguments.settings
        self._arguments = arguments
        self.metrics = RouterMetrics()
        self._discovered, scope = _discover(arguments.fleet, self.metrics)
        self._shared = None if arguments.redis is None else _share(arguments.redis, scope, self.metrics)
        self.fleet = AgentFleetView(
            token=arguments.token,
            settings=FleetViewSettings(binding=arguments.binding),
            on_ejection=lambda role, ejection: self.metrics.ejected_one(role, ejection.reason),
            shared=self._shared,
        )
        for role in Role:
            self.metrics.ejected.labels(role.value).set_function(partial(self.fleet.ejected, role))
        self.client = EngineClient(settings, token=arguments.token)
        self.pairing = Pairing(self.fleet, self.client, settings, self.metrics)
        self.preparer = OpenAiPreparer.load(
            arguments.tokenizer, arguments.model_name, limits=self._limits, created=int(time.time())
        )
        self.application = RouterApplication(
            preparer=self.preparer,
            pairing=self.pairing,
            fleet=self.fleet,
            metrics=self.metrics,
            api_keys=arguments.api_keys,
            fleet_token=arguments.token,
        )
        self.http = HttpServer(self.application, settings, on_sweep=self.client.sweep)
        self.metrics.connections.set_function(lambda: len(self.http.connections))
        levels = ServiceLevels(f"{socket.gethostname()}-{os.getpid()}")
        self.preparer.listeners.append(levels.arrived)
        self.pairing.listeners.append(levels.ended)
        service = RouterService(preparer=self.preparer, pairing=self.pairing, api_keys=arguments.api_keys)
        self._grpc: GrpcServer | None = None
        if arguments.grpc_listen is not None:
            self._grpc = GrpcServer(router=service, levels=levels, ready=lambda: self.fleet.ready)
        self._following: asyncio.Task[None] | None = None
        self._sharing: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, str]:
        """Listen and follow the fleet.

        Returns:
            The event that says where it listens.

        Raises:
            ArgumentError: an address cannot be had.
        """
        arguments = self._arguments
        self._following = asyncio.create_task(self.fleet.run(self._discovered))
        if self._shared is not None:
            self._sharing = asyncio.create_task(self._shared.run(self.fleet.shares))
            self._sharing.add_done_callback(_check_sharing)
        try:
            host, port = await self.http.start(*arguments.listen)
        except OSError as error:
            raise ArgumentError(f"--listen {_written(*arguments.listen)}: {error.strerror or error}") from error
        event = {"event": "listening", "http": _written(host, port)}
        if self._grpc is not None and arguments.grpc_listen is not None:
            host = arguments.grpc_listen[0]
            try:
                port = await self._grpc.start(_written(*arguments.grpc_listen))
            except RuntimeError as error:
                raise ArgumentError(f"--grpc-listen: {error}") from error
            event["grpc"] = _written(host, port)
        return event

    async def serve(self, stop: asyncio.Event, now: asyncio.Event) -> int:
        """Serve until `stop`, then let what runs finish until `now`; give the exit code."""
        following = self._following
        if following is None:
            raise RuntimeError("start the router before it serves")
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            stopping.cancel()
            _log.error("the fleet is no longer followed", error=repr(following.exception()))
            return 1
        draining, hurry = asyncio.create_task(self._drain()), asyncio.create_task(now.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finished = draining.done() and draining.result()
        draining.cancel()
        hurry.cancel()
        if not finished:
            _log.warning("requests were cut")
        return 0

    async def _drain(self) -> bool:
        """Say that nothing more should come, then take nothing more, then let what runs finish."""
        arguments = self._arguments
        _log.info("stopping", lame_duck_seconds=arguments.lame_duck_seconds, drain_seconds=arguments.drain_seconds)
        self.application.stopping = True
        if self._grpc is not None:
            await self._grpc.announce_stop()
        await asyncio.sleep(arguments.lame_duck_seconds)
        seconds = arguments.drain_seconds
        finished, _ = await asyncio.gather(self.http.close(drain_seconds=seconds), self._stop_grpc(seconds))
        return finished

    async def close(self) -> None:
        """Free engines, then close everything."""
        await asyncio.gather(self.http.close(drain_seconds=0), self._stop_grpc(0))
        await self.pairing.close()
        await self.client.close()
        tasks = [task for task in (self._following, self._sharing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.preparer.close()

    async def _stop_grpc(self, seconds: float) -> None:
        grpc, self._grpc = self._grpc, None
        if grpc is not None:
            await grpc.stop(seconds)

    def _limits(self) -> RequestLimits:
        told = self.fleet.limits()
        wished = self._arguments.context_tokens
        known = [tokens for tokens in (wished, told.context_tokens) if tokens is not None]
        return RequestLimits(min(known, default=None), told.kv_tokens)


def _discover(
    fleet: FleetFile | FleetPods, metrics: RouterMetrics
) -> tuple[AsyncIterator[list[DiscoveredInstance]], str]:
    """The instances, and a name that all routers of these instances have in common, and no others."""
    if isinstance(fleet, FleetFile):
        return watch_fleet_file(fleet.path), f"file/{socket.gethostname()}{fleet.path.resolve()}"
    # Only a router on a cluster pays for the client.
    from kllm_router.discovery.access import from_kubeconfig, in_cluster  # noqa: PLC0415
    from kllm_router.discovery.kubernetes import PodWatcher  # noqa: PLC0415

    access = in_cluster() if fleet.kubeconfig is None else from_kubeconfig(fleet.kubeconfig)
    access.check()
    namespace = fleet.namespace or access.namespace
    watcher = PodWatcher(access, service=fleet.service, namespace=namespace, metrics=DiscoveryMetrics(metrics.registry))
    return watcher.changes(), f"pods/{namespace}/{fleet.service}"


def _share(redis: RedisAddress | Path, scope: str, metrics: RouterMetrics) -> RedisShares:
    # Only a router that shares pays for the client.
    from kllm_router.shared.redis import RedisShares  # noqa: PLC0415

    return RedisShares(redis, scope=scope, name=secrets.token_hex(8), metrics=SharedMetrics(metrics.registry))


def _check_sharing(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("load is no longer shared with other routers", exc_info=error)


def _next(first: asyncio.Event, second: asyncio.Event) -> None:
    (second if first.is_set() else first).set()


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    main()
