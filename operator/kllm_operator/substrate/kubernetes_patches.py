"""Changes of a pod's metadata, which hold all that a step must not lose. Pure.

Each is one JSON merge patch, so that labels, owner and annotations change together or not at all. None stands for a
pod that is already as the change would make it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kllm_core import labels
from kllm_core.objectives import Role
from kllm_core.steps import Request
from kllm_operator.render.owner import Owner
from kllm_operator.substrate.kubernetes_pods import DRAINED, OVERDUE, Pod, time_of

Patch = Mapping[str, Any]

_NO_DRAIN = {labels.DRAIN_UNTIL: None, labels.DRAINED: None, labels.DRAINING_TO: None}


def draining(pod: Pod, until: float, to: Role | None) -> Patch | None:
    """It drains, until a time, and leaves then or takes another role."""
    same = pod.drain_until is not None and abs(pod.drain_until - until) < 0.001 and pod.draining_to is to
    if same and pod.drained is None:
        return None
    then = None if to is None else to.value
    drain = {labels.DRAIN_UNTIL: time_of(until), labels.DRAINED: None, labels.DRAINING_TO: then}
    return _patch(pod, annotations=drain)


def drain_ended(pod: Pod, *, empty: bool) -> Patch | None:
    """Its drain has ended."""
    if pod.drain_until is None or pod.drained is empty:
        return None
    return _patch(pod, annotations={labels.DRAINED: DRAINED if empty else OVERDUE})


def switching(pod: Pod, to: Role) -> Patch | None:
    """Its agent is about to be asked for another role."""
    return None if pod.switching_to is to else _patch(pod, annotations={labels.SWITCHING_TO: to.value})


def not_switched(pod: Pod) -> Patch | None:
    """Its agent has not taken the other role: it is drained, and leaves."""
    if pod.switching_to is None:
        return None
    return _patch(pod, annotations={labels.SWITCHING_TO: None, labels.DRAINING_TO: None})


def switched(pod: Pod, to: Role, owner: Owner) -> Patch | None:
    """It serves the other role, and belongs to that role's pool."""
    if pod.label == to.value and pod.owner == owner.uid and pod.switching_to is None:
        return None
    done = {labels.SWITCHING_TO: None, **_NO_DRAIN}
    if pod.requested is Request.FLIP:
        done[labels.REQUESTED] = None
    return _patch(pod, role=to, owner=owner, annotations=done)


def assumed(pod: Pod, role: Role, owner: Owner, *, now: float) -> Patch | None:
    """A slot gets a role, and belongs to that role's pool."""
    if pod.label == role.value and pod.owner == owner.uid:
        return None
    return _patch(pod, role=role, owner=owner, annotations={labels.BEGAN_AT: time_of(now)})


def dismissed(pod: Pod) -> Patch | None:
    """What a person has asked for is not done."""
    metadata = pod.document["metadata"]
    there = labels.REQUESTED in (metadata.get("annotations") or {})
    return _patch(pod, annotations={labels.REQUESTED: None}) if there else None


def _patch(
    pod: Pod, *, annotations: Mapping[str, str | None], role: Role | None = None, owner: Owner | None = None
) -> Patch:
    metadata = pod.document["metadata"]
    body: dict[str, Any] = {
        "uid": pod.uid,
        "resourceVersion": metadata["resourceVersion"],
        "annotations": dict(annotations),
    }
    if role is not None:
        body["labels"] = {labels.ROLE: role.value}
    if owner is not None:
        # A merge patch replaces lists: owners that others have added stay only if they are named.
        others = [each for each in metadata.get("ownerReferences") or () if not each.get("controller")]
        body["ownerReferences"] = [owner.reference(), *others]
    return {"metadata": body}
