"""All services and standalone pools of one operator, each with its runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import RoleStatus, ServiceStatus
from kllm_core.objectives import Role
from kllm_operator.kube.cache import Key, key_of, service_of
from kllm_operator.kube.ownership import controller_of, is_ending
from kllm_operator.kube.resources import (
    INFERENCE_SERVICES,
    NETWORK_POLICIES,
    PODS,
    SERVICE_ACCOUNTS,
    Document,
    Resource,
)
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.pool_runtime import PoolRuntime
from kllm_operator.service.pools import POOLS
from kllm_operator.service.runtime import ServiceRuntime
from kllm_operator.service.standalone import KINDS, PoolKey, asked_service, is_standalone

_SHARED = (SERVICE_ACCOUNTS, NETWORK_POLICIES)
"""Kinds of objects that the pools of one service share."""

_log = structlog.get_logger(__name__)


class Keeper:
    """Keeps every service and every standalone pool that there is.

    The queue calls `reconcile`, one call of a key at a time.

    Args:
        cluster: where they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._runtimes: dict[Key | PoolKey, ServiceRuntime | PoolRuntime] = {}

    def __len__(self) -> int:
        """Services; pools are none."""
        return sum(isinstance(each, ServiceRuntime) for each in self._runtimes.values())

    @property
    def ticking_seconds(self) -> float:
        """For how long the oldest tick of a control loop lasts; 0 without any."""
        return max((each.ticking_seconds for each in self._runtimes.values()), default=0.0)

    def summaries(self) -> Iterator[tuple[InferenceService, ServiceStatus]]:
        """Accepted specs and statuses of all services."""
        for runtime in list(self._runtimes.values()):
            if isinstance(runtime, ServiceRuntime) and runtime.summary is not None:
                yield runtime.summary

    def pools(self) -> Iterator[tuple[Key, Role, RoleStatus]]:
        """Service, role and status of all standalone pools of which a spec was accepted."""
        for runtime in list(self._runtimes.values()):
            if isinstance(runtime, PoolRuntime) and runtime.summary is not None:
                yield runtime.summary

    async def reconcile(self, key: Key | PoolKey) -> float | None:
        """Look at a service or a pool and do what is to be done; seconds until the next look, None when it is gone.

        Raises:
            KubeError: something could not be done; it is to be tried again.
        """
        document = self._document(key)
        runtime = self._runtimes.get(key)
        if runtime is not None and (document is None or runtime.uid != document["metadata"]["uid"]):
            await self._leave(key)
            runtime = None
        if document is None:
            return None
        if is_ending(document):
            # Its objects go with it; whoever made new ones now would only delay that.
            await self._leave(key)
            return None
        if runtime is None:
            kind = PoolRuntime if isinstance(key, PoolKey) else ServiceRuntime
            runtime = self._runtimes[key] = kind(self._cluster, document)
            _log.info("Taken", kind=document["kind"], namespace=key[0], name=key[1])
        return await runtime.reconcile(document)

    def notice(self, resource: Resource, document: Document) -> None:
        """Take the word that an object is new, changed or gone; must not wait."""
        for key in self._concerned(resource, document):
            if (runtime := self._runtimes.get(key)) is None:
                self._cluster.want(key)
                continue
            if (resource is INFERENCE_SERVICES or isinstance(key, PoolKey)) and self._is_leaving(key):
                runtime.halt()
            if runtime.notice(resource, document):
                self._cluster.want(key)

    async def close(self) -> None:
        """Leave all as they are."""
        await asyncio.gather(*(self._leave(key) for key in list(self._runtimes)), return_exceptions=True)

    def _concerned(self, resource: Resource, document: Document) -> Iterator[Key | PoolKey]:
        """What news of an object may concern."""
        if resource is INFERENCE_SERVICES:
            yield key_of(document)
            return
        if resource in POOLS.values():
            pool = PoolKey.of(document)
            if is_standalone(document):
                yield pool
                if self._is_leaving(pool):
                    yield from self._pools_of(asked_service(document), but=pool)
                return
            if pool in self._runtimes:
                yield pool
        elif resource is PODS and (owner := _pool_of(document)) in self._runtimes:
            yield owner
            return
        # Someone may have taken the label of the service from an object, or given it another one.
        named = (service_of(document), _owner_of(document))
        for service in dict.fromkeys(each for each in named if each is not None):
            yield service
            if resource in _SHARED:
                yield from self._pools_of(service)

    def _pools_of(self, service: Key, *, but: PoolKey | None = None) -> Iterator[PoolKey]:
        for key, runtime in list(self._runtimes.items()):
            if (
                isinstance(key, PoolKey)
                and isinstance(runtime, PoolRuntime)
                and key != but
                and runtime.service == service
            ):
                yield key

    def _document(self, key: Key | PoolKey) -> Document | None:
        if not isinstance(key, PoolKey):
            return self._cluster.caches.of(INFERENCE_SERVICES).get(*key)
        pool = self._cluster.caches.of(KINDS[key.kind]).get(key.namespace, key.name)
        return pool if pool is not None and is_standalone(pool) else None

    def _is_leaving(self, key: Key | PoolKey) -> bool:
        document = self._document(key)
        return document is None or is_ending(document)

    async def _leave(self, key: Key | PoolKey) -> None:
        runtime = self._runtimes.pop(key, None)
        if runtime is not None:
            await runtime.close()
            _log.info("Left", namespace=key[0], name=key[1])


def _owner_of(document: Document) -> Key | None:
    """The service that controls an object."""
    controller = controller_of(document)
    if controller is None or controller.get("kind") != INFERENCE_SERVICES.kind:
        return None
    return key_of(document)[0], str(controller.get("name"))


def _pool_of(pod: Document) -> PoolKey:
    """What controls a pod, as if it were a pool."""
    controller = controller_of(pod) or {}
    return PoolKey(key_of(pod)[0], str(controller.get("name")), str(controller.get("kind")))
