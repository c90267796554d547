"""The running half of a service: its instances, what is heard of them, and the loop that keeps them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.fleet.levels import LevelReport
from kllm_operator.fleet.watch import FleetWatch
from kllm_operator.kube.resources import PODS
from kllm_operator.loop.control import Control
from kllm_operator.loop.events import Event
from kllm_operator.loop.report import Report
from kllm_operator.render.owner import Owner
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.pools import POOLS, Pools
from kllm_operator.service.scaled import scaled_of, with_chunks
from kllm_operator.substrate.kubernetes import PodSubstrate
from kllm_operator.substrate.kubernetes_store import PodPlan


class Fleet:
    """Substrate, watch and control loop of one service. Ended by `close`, which ends no instance.

    Args:
        cluster: where it is.
        service: its spec, accepted.
        pools: its pools.
        token: fleet token.
        tell: hears of every decision.
        publish: gets the state after each tick.
        paused: whether it begins without taking steps.

    Raises:
        TemplateError: a pod template cannot be used.
    """

    def __init__(
        self,
        cluster: Cluster,
        service: InferenceService,
        pools: Pools,
        *,
        token: str,
        tell: Callable[[Event], None],
        publish: Callable[[Report], None],
        paused: bool,
    ) -> None:
        self._cluster, self._service, self._pools = cluster, service, pools
        self._plan = self._plan_of(service)
        self._substrate = PodSubstrate(self._plan, api=cluster.api, pods=cluster.caches.of(PODS), token=token)
        settings = with_chunks(cluster.loop, service)
        self._publish = publish
        self._history = None
        if cluster.history is not None:
            self._history = cluster.history.service(service.metadata.namespace, service.name)
        self._watch = FleetWatch(token, levels=settings.levels, hear=self._hear)
        self._control = Control(
            scaled_of(service), self._substrate, self._watch, tell=tell, publish=self._published, settings=settings,
            clock=time.monotonic, counts=pools, stopped=pools.stopped(paused=paused), turn=cluster.turns.wait,
        )  # fmt: skip
        self._control.pause(paused)
        self._task = asyncio.create_task(self._control.run(), name=f"control {service.name}")

    @property
    def revisions(self) -> dict[Role, str]:
        """What each pool makes."""
        return {role: self._substrate.revision(role) for role in Role}

    @property
    def ticking_seconds(self) -> float:
        """For how long the present tick of its loop lasts; 0 between two."""
        return self._control.ticking_seconds

    @property
    def unshared(self) -> str:
        """Why routers do not hear each other though they are to; empty when they do."""
        return self._watch.unshared

    def change(self, service: InferenceService, *, paused: bool) -> None:
        """Go on with another spec, or with pools that are others.

        Raises:
            TemplateError: a pod template cannot be used; nothing has changed then.
        """
        plan = self._plan_of(service)
        if plan != self._plan:
            self._substrate.use(plan)
            self._plan = plan
        if service != self._service:
            self._control.change(scaled_of(service), with_chunks(self._cluster.loop, service))
            self._service = service
        self._control.pause(paused)

    def follow_routers(self, addresses: Collection[str]) -> None:
        """Hear exactly these routers: host:port."""
        self._watch.follow_routers(addresses)

    def notice(self) -> None:
        """A pod of the service has changed."""
        self._substrate.notice()

    def counts_changed(self) -> None:
        """A pool of the service has changed: someone may have written its count."""
        self._control.hurry()

    def halt(self) -> None:
        """Take no more steps from here on."""
        self._control.pause(True)

    async def close(self) -> None:
        """Take no more steps and hear of nothing; instances go on serving."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(self._substrate.close(), self._watch.close(), return_exceptions=True)
        if self._history is not None:
            self._history.close()

    def _hear(self, report: LevelReport) -> None:
        if self._history is not None:
            self._history.hear(report)

    def _published(self, report: Report) -> None:
        self._publish(report)
        if self._history is not None:
            self._history.publish(report, complete=self._watch.forecast(time.monotonic()).complete)

    def _plan_of(self, service: InferenceService) -> PodPlan:
        owners = {}
        for role in Role:
            pool = self._pools.of(role)
            if pool is not None:
                kind, metadata = POOLS[role], pool["metadata"]
                owners[role] = Owner(kind.api_version, kind.kind, metadata["name"], metadata["uid"])
        return PodPlan(service, self._cluster.render.engine, owners)
