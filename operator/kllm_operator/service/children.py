"""The objects of a service but its engine pods: made, kept as they shall be, and removed when nobody wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from kllm_core.conditions import Reason
from kllm_core.labels import SPEC_HASH
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import Key, key_of
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import ConflictError, KubeError
from kllm_operator.kube.ownership import is_controlled_by, is_ending
from kllm_operator.kube.resources import CHILDREN, DEPLOYMENTS, ROLE_BINDINGS, Document, Resource, resource_of
from kllm_operator.kube.together import together
from kllm_operator.service.difference import is_contained
from kllm_operator.service.facts import Trouble

_LAST = frozenset({DEPLOYMENTS, ROLE_BINDINGS})
"""What needs others of the children: pods their account and their policies, a binding its role."""
NO_VERSION = "1"
"""A resourceVersion that no object has: an apply with it makes an object and changes none."""

_log = structlog.get_logger(__name__)


class NameTakenError(KubeError):
    """An object of a child's name is there and belongs to something else."""


def trouble_of(error: KubeError) -> Trouble:
    """What cannot be made, for the status."""
    reason = Reason.NAME_TAKEN if isinstance(error, NameTakenError) else Reason.APPLY_FAILED
    return Trouble(reason, str(error))


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
            documents: all that there shall be.
            service: namespace and name.
            uid: of the service; children of others are not touched.

        Raises:
            NameTakenError: another object has the name of one of them.
            KubeError: one cannot be written; what needs others was not tried then.
        """
        for is_last in (False, True):
            turn = [each for each in documents if (resource_of(each) in _LAST) is is_last]
            await together(*(self._ensure_one(each, uid) for each in turn))
        wanted = {(resource_of(each), key_of(each)) for each in documents}
        for resource in CHILDREN:
            for live in self._caches.of(resource).of(*service):
                is_ours = is_controlled_by(live, uid) and not is_ending(live)
                if is_ours and (resource, key_of(live)) not in wanted:
                    await self._remove(resource, live)

    async def _ensure_one(self, document: Mapping[str, Any], uid: str) -> None:
        resource, (namespace, name) = resource_of(document), key_of(document)
        live = self._caches.of(resource).get(namespace, name)
        if live is None:
            metadata = {**document["metadata"], "resourceVersion": NO_VERSION}
            try:
                await self._apply({**document, "metadata": metadata}, new=True)
            except ConflictError:
                # The cache does not hold it: it is too new, or without our labels.
                live = await self._api.get(resource, namespace=namespace, name=name)
            else:
                return
        if not is_controlled_by(live, uid):
            raise NameTakenError(
                f"{resource.kind} {namespace}/{name} is there and is not this service's: delete it, or give the "
                "service another name"
            )
        # What is being deleted is made again once it is gone, which is told.
        if not is_ending(live) and not self._is_settled(resource, document, live):
            await self._apply(document, new=False)

    async def _apply(self, document: Mapping[str, Any], *, new: bool) -> None:
        applied = self._caches.put(await self._api.apply(document))
        resource, (namespace, name) = resource_of(applied), key_of(applied)
        self._settled[resource, name] = _fingerprint(document, applied)
        _log.info("ChildApplied", resource=resource.qualified, namespace=namespace, name=name, new=new)

    def _is_settled(self, resource: Resource, document: Mapping[str, Any], live: Document) -> bool:
        key, fingerprint = (resource, live["metadata"]["name"]), _fingerprint(document, live)
        # A change of labels or annotations is no new generation.
        if self._settled.get(key) == fingerprint and is_contained(document["metadata"], live["metadata"]):
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
