"""All services of one operator, each with its runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import ServiceStatus
from kllm_operator.kube.cache import Key, key_of, service_of
from kllm_operator.kube.ownership import is_ending
from kllm_operator.kube.resources import INFERENCE_SERVICES, Document, Resource
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.runtime import ServiceRuntime

_log = structlog.get_logger(__name__)


class Keeper:
    """Keeps every service that there is. The queue calls `reconcile`, one call of a key at a time.

    Args:
        cluster: where they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._runtimes: dict[Key, ServiceRuntime] = {}

    def __len__(self) -> int:
        return len(self._runtimes)

    def summaries(self) -> Iterator[tuple[InferenceService, ServiceStatus]]:
        """Accepted specs and statuses of all services."""
        for runtime in list(self._runtimes.values()):
            if runtime.summary is not None:
                yield runtime.summary

    async def reconcile(self, key: Key) -> float | None:
        """Look at a service and do what is to be done; seconds until the next look, None when it is gone.

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
            runtime = self._runtimes[key] = ServiceRuntime(self._cluster, document)
            _log.info("ServiceTaken", namespace=key[0], service=key[1])
        return await runtime.reconcile(document)

    def notice(self, resource: Resource, document: Document) -> None:
        """Take the word that an object is new, changed or gone; must not wait."""
        key = key_of(document) if resource is INFERENCE_SERVICES else service_of(document)
        if key is None:
            return
        if (runtime := self._runtimes.get(key)) is None:
            self._cluster.want(key)
            return
        if resource is INFERENCE_SERVICES and self._is_leaving(key):
            runtime.halt()
        if runtime.notice(resource, document):
            self._cluster.want(key)

    async def close(self) -> None:
        """Leave all services as they are."""
        await asyncio.gather(*(self._leave(key) for key in list(self._runtimes)), return_exceptions=True)

    def _document(self, key: Key) -> Document | None:
        return self._cluster.caches.of(INFERENCE_SERVICES).get(*key)

    def _is_leaving(self, key: Key) -> bool:
        document = self._document(key)
        return document is None or is_ending(document)

    async def _leave(self, key: Key) -> None:
        runtime = self._runtimes.pop(key, None)
        if runtime is not None:
            await runtime.close()
            _log.info("ServiceLeft", namespace=key[0], service=key[1])
