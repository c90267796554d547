"""The objects of a service but its engine pods: made, kept as they shall be, and removed when nobody wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from kllm_core.labels import SPEC_HASH
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import Key, key_of
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import KubeError, NotFoundError
from kllm_operator.kube.ownership import is_controlled_by, is_ending
from kllm_operator.kube.resources import CHILDREN, Document, Resource, resource_of
from kllm_operator.service.difference import is_contained

_log = structlog.get_logger(__name__)


class NameTakenError(KubeError):
    """An object of a child's name is there and belongs to something else."""


class Children:
    """Children of one service. What does not differ costs no call.

    Args:
        api: fenced.
        caches: of all kinds of children.
    """

    def __init__(self, api: KubeApi, caches: Caches) -> None:
        self._api = api
        self._caches = caches
        self._settled: dict[tuple[Resource, str], str] = {}

    async def ensure(self, documents: Sequence[Mapping[str, Any]], *, service: Key, uid: str) -> None:
        """Have exactly these.

        Args:
            documents: in the order in which they are made.
            service: namespace and name.
            uid: of the service; children of others are not touched.

        Raises:
            NameTakenError: another object has the name of one of them.
            KubeError: one cannot be written; what comes after it was not tried.
        """
        for document in documents:
            await self._ensure_one(document, uid)
        wanted = {(resource_of(each), key_of(each)) for each in documents}
        for resource in CHILDREN:
            for live in self._caches.of(resource).of(*service):
                is_ours = is_controlled_by(live, uid) and not is_ending(live)
                if is_ours and (resource, key_of(live)) not in wanted:
                    await self._remove(resource, live)

    async def _ensure_one(self, document: Mapping[str, Any], uid: str) -> None:
        resource, (namespace, name) = resource_of(document), key_of(document)
        live = self._caches.of(resource).get(namespace, name) or await self._unlabelled(resource, namespace, name)
        if live is not None:
            if not is_controlled_by(live, uid):
                raise NameTakenError(
                    f"{resource.kind} {namespace}/{name} is there and is not this service's: delete it, or give the "
                    "service another name"
                )
            # What is being deleted is made again once it is gone, which is told.
            if is_ending(live) or self._is_settled(resource, document, live):
                return
        applied = self._caches.put(await self._api.apply(document))
        self._settled[resource, name] = _fingerprint(document, applied)
        _log.info("ChildApplied", resource=resource.qualified, namespace=namespace, name=name, new=live is None)

    async def _unlabelled(self, resource: Resource, namespace: str, name: str) -> Document | None:
        """The object if there is one that the cache does not hold: it is too new, or without our labels."""
        try:
            return await self._api.get(resource, namespace=namespace, name=name)
        except NotFoundError:
            return None

    def _is_settled(self, resource: Resource, document: Mapping[str, Any], live: Document) -> bool:
        key, fingerprint = (resource, live["metadata"]["name"]), _fingerprint(document, live)
        if self._settled.get(key) == fingerprint:
            return True
        if _hash_of(document) != _hash_of(live) or not is_contained(document, live):
            return False
        self._settled[key] = fingerprint
        return True

    async def _remove(self, resource: Resource, live: Document) -> None:
        (namespace, name), uid = key_of(live), live["metadata"]["uid"]
        await self._api.delete(resource, namespace=namespace, name=name, uid=uid)
        self._settled.pop((resource, name), None)
        _log.info("ChildRemoved", resource=resource.qualified, namespace=namespace, name=name)


def _hash_of(document: Mapping[str, Any]) -> str:
    return str((document["metadata"].get("annotations") or {}).get(SPEC_HASH, ""))


def _fingerprint(document: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """What was asked for, and the state of the object in which it was found to be so."""
    metadata = live["metadata"]
    # The generation does not count status; kinds without one have none that changes.
    return f"{_hash_of(document)} {metadata.get('uid')} {metadata.get('generation') or metadata.get('resourceVersion')}"
