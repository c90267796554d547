"""What all rendered objects share: names, labels, owner and hash. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kllm_core import labels
from kllm_core.kinds.service import InferenceService
from kllm_operator.render.owner import Owner

_DIGITS = 10


def labels_of(service: InferenceService, component: str) -> dict[str, str]:
    """Labels of an object of the service."""
    return {
        labels.NAME: labels.APPLICATION,
        labels.INSTANCE: service.name,
        labels.COMPONENT: component,
        labels.PART_OF: labels.APPLICATION,
        labels.MANAGED_BY: labels.MANAGER,
        labels.SERVICE: service.name,
    }


def selector_of(service: InferenceService, component: str) -> dict[str, str]:
    """Labels that select the service's pods of one component, and none of another service or program."""
    return {labels.NAME: labels.APPLICATION, labels.COMPONENT: component, labels.SERVICE: service.name}


def rendered(
    service: InferenceService,
    *,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    body: Mapping[str, Any],
) -> dict[str, Any]:
    """An object in the service's namespace, without owner.

    Args:
        service: whose it is.
        api_version: of its kind.
        kind: its kind.
        name: its name.
        component: what part of the service it is.
        body: everything but its metadata.
    """
    metadata = {"name": name, "namespace": service.metadata.namespace, "labels": labels_of(service, component)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def owned(document: Mapping[str, Any], service: InferenceService, uid: str) -> dict[str, Any]:
    """The object as the service's own: it goes with it, and tells what it was made from.

    Args:
        document: without owner.
        service: its owner.
        uid: of the owner; another service of the same name is another owner.
    """
    owner = Owner(labels.API_VERSION, "InferenceService", service.name, uid)
    return of_owners(document, [owner.reference()])


def of_owners(document: Mapping[str, Any], references: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The object with its owners, and what tells what it was made from.

    Args:
        document: without owner.
        references: to its owners.
    """
    metadata = {**document["metadata"], "ownerReferences": list(references)}
    whole = {**document, "metadata": metadata}
    annotations = {**metadata.get("annotations", {}), labels.SPEC_HASH: spec_hash(whole)}
    return {**whole, "metadata": {**metadata, "annotations": annotations}}


def spec_hash(document: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that differ wherever documents do."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
