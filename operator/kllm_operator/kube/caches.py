"""Caches of all kinds that are watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kllm_operator.kube.cache import ObjectCache
from kllm_operator.kube.resources import WATCHED, Document, Resource, resource_of


class Caches:
    """One cache of each kind."""

    def __init__(self, resources: Iterable[Resource] = WATCHED) -> None:
        self._caches = {resource: ObjectCache(resource) for resource in resources}

    def __iter__(self) -> Iterator[ObjectCache]:
        return iter(self._caches.values())

    def of(self, resource: Resource) -> ObjectCache:
        """The cache of a kind."""
        return self._caches[resource]

    def put(self, document: Mapping[str, Any]) -> Document:
        """Take the answer to an own write; returns it."""
        self.of(resource_of(document)).put(document)
        return dict(document)
