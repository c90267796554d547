"""Events about a service, its pools and its pods."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from kllm.kubectl.kubectl import Document, Kubectl
from kllm.kubectl.services import moment

_KINDS = frozenset({"InferenceService", "PrefillPool", "DecodePool"})
_ROUTINE = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started", "Killing"})
"""What the scheduler and the kubelet tell of every pod."""


@dataclass(frozen=True)
class Event:
    """One thing that was told of an object.

    Attributes:
        at: when it was told last.
        count: how often.
    """

    at: dt.datetime
    about: str
    type: str
    reason: str
    message: str
    count: int


def find_events(kubectl: Kubectl, names: set[str], pods: set[str]) -> list[Event]:
    """Events about these services and pools, and those about these pods that are not routine; oldest first.

    Raises:
        KubectlError: kubectl failed.
    """
    found = [_event(each) for each in kubectl.list("events") if _is_about(each, names, pods)]
    # The operator tells of an instance at its pod and at its service; once is enough for a reader.
    once = {(each.reason, each.message, each.at.replace(microsecond=0)): each for each in found if each is not None}
    return sorted(once.values(), key=lambda each: each.at)


def _is_about(document: Document, names: set[str], pods: set[str]) -> bool:
    about = document.get("involvedObject") or {}
    kind, name = about.get("kind"), about.get("name")
    if kind == "Pod":
        return name in pods and document.get("reason") not in _ROUTINE
    return kind in _KINDS and name in names


def _event(document: Document) -> Event | None:
    series = document.get("series") or {}
    created = (document.get("metadata") or {}).get("creationTimestamp")
    times = (series.get("lastObservedTime"), document.get("lastTimestamp"), document.get("eventTime"), created)
    at = next((found for text in times if text and (found := moment(text)) is not None), None)
    if at is None:
        return None
    return Event(
        at=at,
        about=str((document.get("involvedObject") or {}).get("name", "")),
        type=str(document.get("type", "")),
        reason=str(document.get("reason", "")),
        message=str(document.get("message", "")),
        count=int(series.get("count") or document.get("count") or 1),
    )
