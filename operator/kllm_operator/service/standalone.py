"""Standalone pools: those that no InferenceService owns. Which they are, and which of them belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kllm_core.labels import GROUP, SERVICE
from kllm_core.objectives import Role
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import Key, key_of, service_of
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.ownership import controller_of, is_ending
from kllm_operator.kube.resources import INFERENCE_SERVICES, Document, resource_of
from kllm_operator.service.pools import POOLS, Pools

_SELECTED = re.compile(rf"(?:^|,){re.escape(SERVICE)}=([^,]+)")
KINDS = {resource.kind: resource for resource in POOLS.values()}
"""Kinds of pools, by name."""


class PoolKey(NamedTuple):
    """A pool."""

    namespace: str
    name: str
    kind: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> PoolKey:
        """That of an object."""
        return cls(*key_of(document), str(document["kind"]))


def is_standalone(pool: Mapping[str, Any]) -> bool:
    """Whether no InferenceService controls a pool; whatever else does is as good as a person."""
    controller = controller_of(pool)
    if controller is None or controller.get("kind") != INFERENCE_SERVICES.kind:
        return True
    return not str(controller.get("apiVersion")).startswith(f"{GROUP}/")


def role_of(pool: Mapping[str, Any]) -> Role:
    """Of a pool's instances."""
    resource = resource_of(pool)
    return next(role for role, kind in POOLS.items() if kind is resource)


def asked_service(pool: Mapping[str, Any]) -> Key:
    """The service that a pool's label names; without the label, one of the pool's own name."""
    return service_of(pool) or key_of(pool)


def present_service(pool: Mapping[str, Any]) -> Key | None:
    """The service that its instances are labelled with, which its status tells; None as long as it never had any."""
    found = _SELECTED.search(str((pool.get("status") or {}).get("selector") or ""))
    return None if found is None else (key_of(pool)[0], found[1])


def members(caches: Caches, service: Key) -> list[Document]:
    """Standalone pools of a service: first those that had instances of it, the oldest first, then the others."""
    found = [
        pool
        for resource in POOLS.values()
        for pool in caches.of(resource).all()
        if (present_service(pool) or asked_service(pool)) == service and is_standalone(pool) and not is_ending(pool)
    ]

    def turn(pool: Document) -> tuple[bool, str, str]:
        metadata = pool["metadata"]
        return present_service(pool) is None, str(metadata.get("creationTimestamp")), str(metadata["uid"])

    return sorted(found, key=turn)


class SinglePool(Pools):
    """One standalone pool in the place of a service's two.

    Args:
        api: fenced.
        caches: of the pools' kinds.
        pool: its object; one that is made anew under the same name is another.
    """

    def __init__(self, api: KubeApi, caches: Caches, pool: Mapping[str, Any]) -> None:
        namespace, name = key_of(pool)
        super().__init__(api, caches, namespace=namespace, name=name, uid=str(pool["metadata"]["uid"]))
        self._role = role_of(pool)

    def of(self, role: Role) -> Document | None:
        """The pool, if it is of that role."""
        if role is not self._role:
            return None
        pool = self._caches.of(POOLS[role]).get(self._namespace, self._name)
        return pool if pool is not None and pool["metadata"]["uid"] == self._uid else None
