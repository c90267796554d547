"""`kllm-operator`: keeps InferenceServices on a Kubernetes cluster.

What the watches tell goes into caches and, as the key of a service, onto the work queue; all decisions are made by the
workers of that queue and by the services' control loops, on the replica that leads.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stamina.instrumentation
import structlog

from kllm_core.logs import configure_logs
from kllm_operator.config import ConfigError, OperatorConfig, read_config
from kllm_operator.fleet.event_loop import PromptLoop
from kllm_operator.history.folder import HistoryFolder
from kllm_operator.http import PORT, HttpServer
from kllm_operator.kube.cache import Key
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.client import ApiServer
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.informer import Informer
from kllm_operator.kube.lease import Election, LeaseLostError
from kllm_operator.kube.login import Login, LoginError
from kllm_operator.kube.queue import WorkQueue
from kllm_operator.kube.recorder import Recorder
from kllm_operator.kube.resources import Resource
from kllm_operator.metrics import OperatorMetrics
from kllm_operator.render.config import NetworkConfig, RedisConfig, RenderConfig, RouterConfig
from kllm_operator.render.engine import EngineConfig
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.collector import ServiceCollector
from kllm_operator.service.keeper import Keeper
from kllm_operator.service.standalone import PoolKey

EXIT_USAGE = 2
EXIT_LEASE_LOST = 3

_WORKERS = 16
_STUCK_SECONDS = 600.0
"""Work that lasts longer than this will not end: each of its calls ends in less than a minute."""
_STUCK_TICK_SECONDS = 1800.0
"""The same of a tick, which makes more calls: one for each count and for each request of people that is refused."""
_RETRY_SECONDS = 5.0
_NEW_OBJECTS = 10_000
"""Between two looks for garbage among the newest objects. A pod is hundreds of them, of which nearly all stay or go
without being looked for; Python's own 700 are meant for small programs."""

_log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit status."""
    options = _parser().parse_args(arguments)
    configure_logs(getattr(logging, options.log_level.upper()))
    # Repeated calls are counted, and what did not help is logged by whoever asked for it.
    stamina.instrumentation.set_on_retry_hooks(())
    try:
        config = read_config(options.config)
        # What was imported stays for good, and need not be looked at.
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)
        with asyncio.Runner(loop_factory=PromptLoop) as runner:
            return runner.run(_run(options, config))
    except (ConfigError, LoginError) as error:
        print(f"kllm-operator: {error}", file=sys.stderr)  # noqa: T201  for the person who started it
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kllm-operator",
        description="Keeps kLLM's InferenceServices on a Kubernetes cluster: engine pods, routers and their numbers.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="settings (YAML); the chart renders them"
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE",
        help="way to the API server; left out: KUBECONFIG, else the pod's service account, else ~/.kube/config",
    )  # fmt: skip
    parser.add_argument(
        "--namespace", metavar="NAME", action="append", default=[],
        help="namespace to watch, may be repeated; left out: watchNamespaces of the settings, else all",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=f"0.0.0.0:{PORT}", type=_address,
        help="address of /livez, /readyz and /metrics (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


async def _run(options: argparse.Namespace, config: OperatorConfig) -> int:
    login = Login(options.kubeconfig)
    await login.load()
    metrics = OperatorMetrics()
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    # The lease has connections of its own: where hundreds of writes wait for one, its renewal does not.
    async with ApiServer(login, observe=metrics.called) as lease_api:
        leadership = Leadership(_election(lease_api, config, identity), identity)
        async with ApiServer(login, observe=metrics.called, leading=leadership.holds) as api:
            return await Operator(options, config, login=login, api=api, leadership=leadership, metrics=metrics).run()


@dataclass(frozen=True)
class Leadership:
    """Whether this process may act.

    Attributes:
        election: None: there is no other replica.
        identity: of this process, unlike all others'.
    """

    election: Election | None
    identity: str

    def holds(self) -> bool:
        """Whether it leads for certain at this moment."""
        return self.election is None or self.election.leading


class Operator:
    """One process of the operator.

    Args:
        options: of the command line.
        config: its settings.
        login: way to the API server.
        api: the API server; it refuses to write while the leadership does not hold.
        leadership: of this process.
        metrics: of this process.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        config: OperatorConfig,
        *,
        login: Login,
        api: ApiServer,
        leadership: Leadership,
        metrics: OperatorMetrics,
    ) -> None:
        self._listen, self._metrics = options.listen, metrics
        self._stop, self._leading, self._filled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._election = leadership.election
        caches = Caches()
        self._recorder = Recorder(api, instance=leadership.identity)
        self._queue: WorkQueue[Key | PoolKey] = WorkQueue(self._reconcile, workers=_WORKERS, observer=metrics)
        self._keeper = Keeper(
            Cluster(
                api=api, caches=caches, recorder=self._recorder, metrics=metrics, render=render_config(config),
                loop=config.loop_settings, want=self._queue.add, history=_history(config),
            )
        )  # fmt: skip
        self._informer = Informer(
            login, api, caches, namespaces=options.namespace or config.watch_namespaces,
            changed=self._keeper.notice, corrected=self._corrected,
        )  # fmt: skip
        self._http = HttpServer(metrics, alive=self._why_dead, ready=self._why_unready)
        metrics.watch(
            depth=lambda: len(self._queue),
            leading=lambda: float(leadership.holds()),
            services=lambda: len(self._keeper),
        )
        metrics.registry.register(ServiceCollector(self._keeper.summaries, self._keeper.pools))

    async def run(self) -> int:
        """Run until told to stop, or until something ends without which nothing goes on; the exit status."""
        await self._http.start(*self._listen)
        self._take_signals()
        parts = {"lead": self._lead(), "work": self._work(), "sweep": self._sweep()}
        tasks = [asyncio.create_task(work, name=name) for name, work in parts.items()]
        watch = asyncio.create_task(self._watch(), name="watch")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({*tasks, watch, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return _verdict(done)
        finally:
            self._stop.set()
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._leave()
            if not self._filled.is_set():
                # It has not come to where it hears of the stop.
                watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _leave(self) -> None:
        await self._keeper.close()
        await self._recorder.close()
        if self._election is not None:
            await self._election.release()
        await self._http.close()

    async def _watch(self) -> None:
        """Fill the caches, then keep them so."""
        while not self._filled.is_set():
            try:
                await self._informer.fill()
                self._filled.set()
            except KubeError as error:
                # Without the kinds there is nothing to watch; they may be on their way.
                _log.warning("CachesNotFilled", error=str(error), again_seconds=_RETRY_SECONDS)
                await asyncio.sleep(_RETRY_SECONDS)
        begun = asyncio.Event()
        taking = asyncio.create_task(self._take_signals_after(begun), name="signals")
        try:
            await self._informer.watch(self._stop, begun)
        finally:
            taking.cancel()

    async def _take_signals_after(self, begun: asyncio.Event) -> None:
        # kopf takes them when it begins, and would end before the services are left in order.
        await begun.wait()
        self._take_signals()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop.set)

    async def _lead(self) -> None:
        """Become the leader and stay it.

        Raises:
            LeaseLostError: another leads.
        """
        # A replica that cannot see what there is would only keep another one from leading.
        await self._filled.wait()
        if self._election is not None:
            await self._election.acquire()
        self._leading.set()
        if self._election is not None:
            await self._election.keep()
        await self._stop.wait()

    async def _work(self) -> None:
        await self._leading.wait()
        # What the leader before this one did last may not have been told yet, and is not to be done twice.
        while not await self._informer.catch_up():  # noqa: ASYNC110  nothing tells that the server can be read again
            await asyncio.sleep(_RETRY_SECONDS)
        await self._queue.run()

    async def _sweep(self) -> None:
        await self._filled.wait()
        await self._informer.sweep()

    async def _reconcile(self, key: Key | PoolKey) -> float | None:
        return await self._keeper.reconcile(key)

    def _corrected(self, resource: Resource, objects: int) -> None:
        self._metrics.corrections.labels(resource.qualified).inc(objects)

    def _why_dead(self) -> str:
        """What will never go on. A server that is away is no such thing: calls to it end, and are tried again."""
        if (seconds := self._queue.longest_seconds) > _STUCK_SECONDS:
            return f"a reconcile has lasted {seconds:.0f} s"
        if (seconds := self._queue.stalled_seconds) > _STUCK_SECONDS:
            return f"no reconcile was begun for {seconds:.0f} s while some were wanted"
        if (seconds := self._keeper.ticking_seconds) > _STUCK_TICK_SECONDS:
            return f"a tick of a control loop has lasted {seconds:.0f} s"
        return self._informer.trouble

    def _why_unready(self) -> str:
        return "" if self._filled.is_set() else "the caches are not filled yet"


def render_config(config: OperatorConfig) -> RenderConfig:
    """What renderers need of the settings."""
    engine, router, network, redis = config.engine, config.router, config.network_policy, config.redis
    return RenderConfig(
        engine=EngineConfig(
            image=config.images.engine.image,
            pull_policy=config.images.engine.pull_policy,
            pull_secrets=config.image_pull_secrets,
            command=engine.command,
            template=engine.template or None,
            drain_seconds=engine.drain_seconds,
            pace=engine.pace,
        ),
        router=RouterConfig(
            image=config.images.router.image,
            pull_policy=config.images.router.pull_policy,
            pull_secrets=config.image_pull_secrets,
            command=router.command,
            template=router.template or None,
            lame_duck_seconds=router.lame_duck_seconds,
            drain_seconds=router.drain_seconds,
            workers=router.workers,
            access_log=router.access_log,
            redis=None if redis is None else RedisConfig(redis.url, redis.secret_name, redis.secret_key),
        ),
        network=None
        if network is None
        else NetworkConfig(
            operator_namespace=os.environ.get("POD_NAMESPACE", "default"),
            operator_labels=network.operator_labels,
            clients=network.clients,
            metrics=network.metrics,
        ),
    )


def _history(config: OperatorConfig) -> HistoryFolder | None:
    wanted = config.history
    if wanted is None:
        return None
    return HistoryFolder(
        Path(wanted.folder), most_bytes=wanted.most_mebibytes << 20, file_bytes=wanted.file_mebibytes << 20
    )


def _verdict(done: set[asyncio.Task[Any]]) -> int:
    """The exit status, after one of the parts has ended."""
    for task in done:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LeaseLostError):
            _log.critical("LeaseLost", error=str(error))
            # Another replica may act from here on: nothing that runs gets one more moment.
            os._exit(EXIT_LEASE_LOST)
    if any(task.get_name() == "stop" for task in done):
        return 0
    for task in done:
        error = None if task.cancelled() else task.exception()
        _log.critical("OperatorFailed", part=task.get_name(), error=str(error), exc_info=error)
    return 1


def _election(api: ApiServer, config: OperatorConfig, identity: str) -> Election | None:
    settings = config.leader_election
    if not settings.enabled:
        return None
    namespace = settings.namespace or os.environ.get("POD_NAMESPACE", "default")
    return Election(api, namespace=namespace, name=settings.lease_name, identity=identity)


if __name__ == "__main__":
    sys.exit(main())
