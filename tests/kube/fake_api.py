"""An API server in memory: what of its semantics the operator relies on. The real one proves the same in e2e."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from kube.authorization import missing

from kllm_operator.kube.exceptions import (
    AlreadyExistsError,
    ConflictError,
    KubeError,
    NotFoundError,
)
from kllm_operator.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, Document, Resource, resource_of

Watcher = Callable[[str, Document], None]


class FakeApi:
    """Objects with uid, resourceVersion and generation, preconditions, owner references and field ownership of one.

    Args:
        restricted: a call that the operator's role does not allow fails the test.

    Attributes:
        calls: verb and kind/name of each, in order.
        fail: called before each call with verb, resource and name; what it returns is raised.
    """

    def __init__(self, *, restricted: bool = True) -> None:
        self._restricted = restricted
        self.objects: dict[tuple[Resource, str, str], Document] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail: Callable[[str, Resource, str], KubeError | None] = lambda verb, resource, name: None
        self.watchers: list[Watcher] = []
        self._applied: dict[tuple[Resource, str, str, str], Document] = {}
        # As on a real server, no object has version 1.
        self._versions = itertools.count(2)
        self._uids = itertools.count(1)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] not in {"get", "list"}]

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> Document:
        await self._call("get", resource, name)
        return copy.deepcopy(self._found(resource, namespace, name))

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> list[Document]:
        await self._call("list", resource, "")
        wanted = dict(part.split("=") for part in labels.split(",") if part)
        chosen = dict(part.split("=") for part in fields.split(",") if part)
        found = [
            copy.deepcopy(document)
            for (kind, where, _), document in sorted(self.objects.items(), key=lambda item: item[0][1:])
            if kind == resource
            and namespace in (None, where)
            and wanted.items() <= (document["metadata"].get("labels") or {}).items()
            and all(_at(document, path) == value for path, value in chosen.items())
        ]
        if metadata_only:
            found = [{key: each[key] for key in ("apiVersion", "kind", "metadata")} for each in found]
        return found

    async def create(self, document: Mapping[str, Any]) -> Document:
        resource, namespace, name = _address(document)
        await self._call("create", resource, name)
        if (resource, namespace, name) in self.objects:
            raise AlreadyExistsError(f"{resource.plural} {name!r} already exists", reason="AlreadyExists", status=409)
        return self._new(resource, document)

    async def apply(self, document: Mapping[str, Any]) -> Document:
        resource, namespace, name = _address(document)
        await self._call("apply", resource, name)
        key = (resource, namespace, name)
        if key not in self.objects:
            self._applied[(*key, "")] = copy.deepcopy(dict(document))
            made = self._new(resource, document)
            if self._is_orphaned(made):
                # It was on its way when its owner went.
                self.remove(made)
            return made
        before = self._applied.get((*key, ""), {})
        self._applied[(*key, "")] = copy.deepcopy(dict(document))
        live = self.objects[key]
        self._check(live, document["metadata"])
        wanted = copy.deepcopy(live)
        _prune(wanted, before, document)
        _merge(wanted, document)
        return self._store(key, live, wanted)

    async def apply_status(self, document: Mapping[str, Any]) -> Document:
        resource, namespace, name = _address(document)
        await self._call("apply_status", resource, name)
        key = (resource, namespace, name)
        live = self._found(resource, namespace, name)
        self._check(live, document["metadata"])
        before = self._applied.get((*key, "status"), {})
        self._applied[(*key, "status")] = copy.deepcopy(dict(document))
        wanted = copy.deepcopy(live)
        status = wanted.setdefault("status", {})
        _prune(status, before.get("status", {}), document.get("status", {}))
        _merge(status, document.get("status", {}))
        return self._store(key, live, wanted, generation=False)

    async def patch(
        self, resource: Resource, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Document:
        await self._call("patch", resource, name)
        key = (resource, namespace, name)
        live = self._found(resource, namespace, name)
        self._check(live, body.get("metadata") or {})
        wanted = copy.deepcopy(live)
        _merge_patch(wanted, body)
        return self._store(key, live, wanted, generation=not subresource)

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        await self._call("delete", resource, name)
        live = self.objects.get((resource, namespace, name))
        if live is not None and live["metadata"]["uid"] == uid:
            self.remove(live)

    def seed(self, document: Mapping[str, Any]) -> Document:
        """Somebody else makes an object."""
        return self._new(resource_of(document), document)

    def change(self, document: Document, change: Callable[[Document], None]) -> Document:
        """Somebody else changes an object."""
        key = _address(document)
        live = self.objects[key]
        wanted = copy.deepcopy(live)
        change(wanted)
        return self._store(key, live, wanted)

    def remove(self, document: Document) -> None:
        """An object goes, and with it all of which it was the last owner."""
        uid = document["metadata"]["uid"]
        gone = self.objects.pop(_address(document))
        self._tell("DELETED", {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(next(self._versions))}})
        for owned in list(self.objects.values()):
            owners = owned["metadata"].get("ownerReferences") or ()
            if any(owner["uid"] == uid for owner in owners) and self._is_orphaned(owned):
                self.remove(owned)

    def _is_orphaned(self, document: Document) -> bool:
        owners = {owner["uid"] for owner in document["metadata"].get("ownerReferences") or ()}
        there = {each["metadata"]["uid"] for each in self.objects.values()}
        return bool(owners) and owners.isdisjoint(there)

    def one(self, resource: Resource, name: str, namespace: str = "default") -> Document:
        return self.objects[resource, namespace, name]

    def names(self, resource: Resource) -> list[str]:
        return sorted(name for kind, _, name in self.objects if kind == resource)

    async def _call(self, verb: str, resource: Resource, name: str) -> None:
        if self._restricted and resource is not CUSTOM_RESOURCE_DEFINITIONS:
            assert not missing(verb, resource), f"the operator's role lacks {missing(verb, resource)}"
        self.calls.append((verb, f"{resource.kind}/{name}"))
        await asyncio.sleep(0)
        error = self.fail(verb, resource, name)
        if error is not None:
            raise error

    def _found(self, resource: Resource, namespace: str | None, name: str) -> Document:
        try:
            return self.objects[resource, namespace or "", name]
        except KeyError:
            raise NotFoundError(f"{resource.plural} {name!r} not found", reason="NotFound", status=404) from None

    @staticmethod
    def _check(live: Document, metadata: Mapping[str, Any]) -> None:
        for name in ("uid", "resourceVersion"):
            if name in metadata and metadata[name] != live["metadata"][name]:
                raise ConflictError(f"the object has another {name}", reason="Conflict", status=409)

    def _new(self, resource: Resource, document: Mapping[str, Any]) -> Document:
        made: Document = copy.deepcopy(dict(document))
        made["metadata"] |= {
            "uid": f"uid-{next(self._uids)}",
            "resourceVersion": str(next(self._versions)),
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        if resource.kind in {"PrefillPool", "DecodePool"}:
            made.setdefault("spec", {}).setdefault("replicas", 1)
        self.objects[_address(made)] = made
        self._tell("ADDED", made)
        return copy.deepcopy(made)

    def _store(
        self, key: tuple[Resource, str, str], live: Document, wanted: Document, *, generation: bool = True
    ) -> Document:
        if wanted != live:
            metadata = wanted["metadata"]
            metadata["resourceVersion"] = str(next(self._versions))
            if generation and wanted.get("spec") != live.get("spec"):
                metadata["generation"] += 1
            self.objects[key] = wanted
            self._tell("MODIFIED", wanted)
        return copy.deepcopy(self.objects[key])

    def _tell(self, what: str, document: Document) -> None:
        for watcher in self.watchers:
            watcher(what, copy.deepcopy(document))


def _at(document: Mapping[str, Any], path: str) -> object:
    found: Any = document
    for name in path.split("."):
        found = found.get(name, {})
    return found


def _address(document: Mapping[str, Any]) -> tuple[Resource, str, str]:
    metadata = document["metadata"]
    return resource_of(document), metadata.get("namespace", ""), metadata["name"]


def _merge_patch(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, Mapping):
            nested = target.get(key)
            target[key] = nested if isinstance(nested, dict) else {}
            _merge_patch(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def _merge(target: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """As server-side apply merges: maps by key, conditions by type, other lists as a whole."""
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            nested = target.setdefault(key, {})
            _merge(nested, value)
        elif key == "conditions":
            named = {each["type"]: each for each in target.get(key, ())}
            named |= {each["type"]: copy.deepcopy(each) for each in value}
            target[key] = list(named.values())
        else:
            target[key] = copy.deepcopy(value)


def _prune(target: dict[str, Any], before: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Take away what this manager applied before and does not any more."""
    for key, value in before.items():
        if key == "conditions" and key in target:
            gone = {each["type"] for each in value} - {each["type"] for each in wanted.get(key, ())}
            target[key] = [each for each in target[key] if each["type"] not in gone]
        elif key not in wanted:
            target.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _prune(target[key], value, wanted[key])
