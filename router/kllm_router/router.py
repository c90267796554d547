"""One router: all parts, wired."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from kllm_core.objectives import Role
from kllm_router.arguments import ArgumentError, Arguments, FleetFile, FleetPods, write_address
from kllm_router.discovery.file import watch_fleet_file
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.frontend.access_log import AccessLog
from kllm_router.frontend.application import RouterApplication
from kllm_router.frontend.certificates import CertificateError, follow_certificate, server_context
from kllm_router.frontend.gate import Gate
from kllm_router.frontend.grpc_server import GrpcServer
from kllm_router.frontend.grpc_service import RouterService
from kllm_router.frontend.http_server import HttpServer
from kllm_router.frontend.keys import KeyRing, follow_keys
from kllm_router.frontend.limiter import Limiter
from kllm_router.frontend.openai import OpenAiPreparer
from kllm_router.limits import RequestLimits
from kllm_router.metrics import DiscoveryMetrics, RouterMetrics, SharedMetrics
from kllm_router.proxy.fleet_view import AgentFleetView, FleetViewSettings
from kllm_router.proxy.pairing import Pairing
from kllm_router.proxy.upstream import EngineClient
from kllm_router.scheduling.admission import AdmissionSettings
from kllm_router.scheduling.slack import SlackSettings
from kllm_router.service_levels import ServiceLevels
from kllm_router.shared.folder import Folder
from kllm_router.shared.levels import LevelsExchange
from kllm_router.shared.local import Alone
from kllm_router.shared.told import Told
from kllm_router.shared.workers import WorkerShares

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from kllm_router.arguments import Certificate
    from kllm_router.scheduling.expected import Mark
    from kllm_router.shared.address import RedisAddress
    from kllm_router.shared.redis import RedisShares

_KNOWN_STEP_SECONDS = 0.02
_KNOWN_STEPS = 500

_log = structlog.get_logger(__name__)


class Router:
    """All parts of one router, wired."""

    def __init__(self, arguments: Arguments) -> None:
        settings = arguments.settings
        self._arguments = arguments
        self.metrics = RouterMetrics()
        worker = arguments.worker
        self._folder = None if worker is None else Folder(worker.folder, f"{worker.number}-{os.getpid()}")
        if worker is not None and worker.replaces:
            self.metrics.replaced_worker()
        self._discovered, scope = _discover(arguments.fleet, self.metrics)
        self._shared = self._sharing_of(arguments.redis, scope)
        self.fleet = AgentFleetView(
            token=arguments.token,
            settings=FleetViewSettings(
                binding=arguments.binding,
                admission=AdmissionSettings(slack=SlackSettings(ttft_seconds=arguments.ttft_seconds)),
            ),
            on_ejection=lambda role, ejection: self.metrics.ejected_one(role, ejection.reason),
            shared=self._shared,
        )
        for role in Role:
            self.metrics.follow(self.metrics.ejected.labels(role.value), partial(self.fleet.ejected, role))
        self.client = EngineClient(settings, token=arguments.token)
        self.pairing = Pairing(self.fleet, self.client, settings, self.metrics)
        self.preparer = OpenAiPreparer.load(
            arguments.tokenizer, arguments.model_name, limits=self._limits, created=int(time.time())
        )
        self._keys = KeyRing(arguments.keys)
        self._limiter = Limiter(shared=self._shared or Alone(), on_refusal=self.metrics.limited)
        self._access_log: AccessLog | None = None
        if arguments.access_log is not None:
            self._access_log = AccessLog(arguments.access_log, on_drop=self.metrics.dropped)
        gate = Gate(self._keys, self._limiter, self._access_log)
        self.application = RouterApplication(
            preparer=self.preparer,
            pairing=self.pairing,
            fleet=self.fleet,
            metrics=self.metrics,
            gate=gate,
            fleet_token=arguments.token,
        )
        self.http = HttpServer(self.application, settings, on_sweep=self._sweep)
        self.metrics.follow(self.metrics.connections, lambda: len(self.http.connections))
        room = self.pairing.room
        self.metrics.follow(self.metrics.waiting, lambda: room.requests)
        # To the operator all workers are one router.
        process = os.getpid() if worker is None else os.getppid()
        levels = ServiceLevels(
            f"{socket.gethostname()}-{process}", waiting=lambda: room.requests, unshared=self._unshared
        )
        self._levels = levels
        room.listeners.append(levels.hurry)
        self.preparer.listeners.append(levels.arrived)
        self.pairing.listeners.append(levels.ended)
        service = RouterService(preparer=self.preparer, pairing=self.pairing, gate=gate)
        self._grpc: GrpcServer | None = None
        if arguments.grpc_listen is not None:
            self._grpc = GrpcServer(
                router=service,
                levels=levels,
                ready=lambda: self.pairing.takes_requests,
                share_port=worker is not None,
            )
        self._following: asyncio.Task[None] | None = None
        self._helping: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, str]:
        """Listen and follow the fleet.

        Returns:
            The event that says where it listens.

        Raises:
            ArgumentError: an address cannot be had.
        """
        arguments = self._arguments
        tls = None if arguments.certificate is None else self._certified(arguments.certificate)
        self._following = asyncio.create_task(self.fleet.run(self._discovered))
        if self._shared is not None:
            self._help("sharing", self._shared.run(self._told))
        if self._folder is not None:
            self._help("levels", LevelsExchange(self._folder, self._levels).run())
        if arguments.key_file is not None:
            told = partial(self._reloaded, "keys")
            self._help("keys", follow_keys(arguments.key_file, self._keys, on_reload=told))
        if arguments.worker is None:
            try:
                host, port = await self.http.start(arguments.listen, tls=tls)
            except OSError as error:
                raise ArgumentError(
                    f"--listen {write_address(*arguments.listen)}: {error.strerror or error}"
                ) from error
        else:
            accepting = socket.socket(fileno=arguments.worker.socket)
            host, port = accepting.getsockname()[:2]
            self._help("accepting", self._accept(accepting, tls))
        event = {"event": "listening", "http": write_address(host, port)}
        if self._grpc is not None and arguments.grpc_listen is not None:
            host = arguments.grpc_listen[0]
            try:
                port = await self._grpc.start(write_address(*arguments.grpc_listen))
            except RuntimeError as error:
                raise ArgumentError(f"--grpc-listen: {error}") from error
            event["grpc"] = write_address(host, port)
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
        tasks = [*self._helping, *([] if self._following is None else [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.preparer.close()
        if self._access_log is not None:
            await asyncio.to_thread(self._access_log.close)

    async def _stop_grpc(self, seconds: float) -> None:
        grpc, self._grpc = self._grpc, None
        if grpc is not None:
            await grpc.stop(seconds)

    async def _accept(self, accepting: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take clients once the fleet is known: they are sent here as soon as another worker is ready."""
        for _ in range(_KNOWN_STEPS):
            if self.fleet.known:
                break
            await asyncio.sleep(_KNOWN_STEP_SECONDS)
        await self.http.start(accepting, tls=tls)

    def _sharing_of(self, redis: RedisAddress | Path | None, scope: str) -> RedisShares | WorkerShares | None:
        """Through Redis if there is one, with other workers alone if there are any, else with nobody."""
        if redis is not None:
            # Only a router that shares pays for the client.
            from kllm_router.shared.redis import RedisShares  # noqa: PLC0415

            metrics = SharedMetrics(self.metrics.registry)
            return RedisShares(redis, scope=scope, name=secrets.token_hex(8), metrics=metrics, on_home=self._expect)
        return None if self._folder is None else WorkerShares(self._folder, on_home=self._expect)

    def _unshared(self) -> str:
        return "" if self._shared is None else self._shared.unshared()

    def _expect(self, instance_id: str, marks: Sequence[Mark], now: float) -> None:
        self.fleet.expected.note(instance_id, marks, now)

    def _told(self) -> Told:
        """What other routers should hear."""
        homes = self.fleet.homes.told(time.monotonic())
        return Told(shares=self.fleet.shares(), spent=self._limiter.spent(), homes=homes)

    def _certified(self, certificate: Certificate) -> ssl.SSLContext:
        chain, key = certificate.chain, certificate.key
        try:
            context = server_context(chain, key)
        except CertificateError as error:
            raise ArgumentError(f"--tls-certificate-file, --tls-key-file: {error}") from error
        told = partial(self._reloaded, "certificate")
        self._help("certificate", follow_certificate(context, chain, key, on_reload=told))
        return context

    def _reloaded(self, what: str, used: bool) -> None:
        self.metrics.reloaded(what, used=used)

    def _help(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_check_helper)
        self._helping.append(task)

    def _sweep(self, now: float) -> None:
        self.client.sweep(now)
        if self._folder is not None:
            self.metrics.refresh()
        if self._access_log is not None:
            self._access_log.flush()

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


def _check_helper(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a part of the router has failed", part=task.get_name(), exc_info=error)
