"""What is known of the objects of one kind, as the watch and the operator's own writes tell it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from kllm_core.labels import SERVICE
from kllm_operator.kube.resources import Document, Resource

Key = tuple[str, str]
"""Namespace and name."""

_REMEMBERED_GONE = 10_000
"""Uids of objects that went, so that an answer that is late does not bring one back."""


class ObjectCache:
    """Objects of one kind by namespace and name. Of two words about one object the newer counts, whoever brings it.

    So the answer to an own write is put in here at once, and what the watch still tells of the time before changes
    nothing. Objects are to be read and never to be changed.
    """

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self._objects: dict[Key, Document] = {}
        self._by_service: dict[Key, set[Key]] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, namespace: str, name: str) -> Document | None:
        """The object, or None."""
        return self._objects.get((namespace, name))

    def of(self, namespace: str, service: str) -> list[Document]:
        """Objects with the label of a service, in the order of their names."""
        return [self._objects[key] for key in sorted(self._by_service.get((namespace, service), ()))]

    def all(self) -> Iterable[Document]:
        """All of them."""
        return tuple(self._objects.values())

    def put(self, document: Mapping[str, Any]) -> bool:
        """Take a word about an object; whether it was news."""
        key, metadata = key_of(document), document["metadata"]
        if version_of(document) <= self._gone.get(str(metadata.get("uid")), -1):
            return False
        before = self._objects.get(key)
        if before is not None and not _is_newer(metadata, before["metadata"]):
            return False
        self._drop(key)
        # Who wrote which field is half of an object, and nobody here asks.
        kept = {name: value for name, value in metadata.items() if name != "managedFields"}
        self._objects[key] = {**document, "metadata": kept}
        service = service_of(document)
        if service is not None:
            self._by_service.setdefault(service, set()).add(key)
        return True

    def remove(self, document: Mapping[str, Any]) -> bool:
        """Take the word that an object is gone; whether it was news.

        One that has only lost the labels by which a watch selects is told in the same way. It may come back, with a
        version that is newer than its going.
        """
        key, uid = key_of(document), document["metadata"].get("uid")
        if uid:
            self._gone[uid] = max(version_of(document), self._gone.get(uid, 0))
            while len(self._gone) > _REMEMBERED_GONE:
                self._gone.popitem(last=False)
        before = self._objects.get(key)
        if before is None or (uid and before["metadata"].get("uid") != uid):
            return False
        self._drop(key)
        return True

    def _drop(self, key: Key) -> None:
        before = self._objects.pop(key, None)
        service = service_of(before) if before is not None else None
        if service is not None:
            named = self._by_service[service]
            named.discard(key)
            if not named:
                del self._by_service[service]


def key_of(document: Mapping[str, Any]) -> Key:
    """Namespace and name of an object."""
    metadata = document["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


def service_of(document: Mapping[str, Any]) -> Key | None:
    """Namespace and name of the service that an object's label names; None without one."""
    metadata = document["metadata"]
    name = (metadata.get("labels") or {}).get(SERVICE)
    return (str(metadata.get("namespace", "")), str(name)) if name else None


def version_of(document: Mapping[str, Any]) -> int:
    """The resourceVersion, which grows with each change; 0 if it cannot be compared."""
    text = str(document["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _is_newer(metadata: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    version, known = version_of({"metadata": metadata}), version_of({"metadata": before})
    return not version or not known or version > known
