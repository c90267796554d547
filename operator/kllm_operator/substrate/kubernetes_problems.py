"""Why a pod does not serve, in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kllm_core.conditions import Reason
from kllm_core.models.exceptions import (
    AccessDeniedError,
    DiskFullError,
    HubUnreachableError,
    ModelNotFoundError,
    ModelUnusableError,
    WrongAddressError,
)
from kllm_operator.render.engine import CONTAINER, MODEL_CONTAINER
from kllm_operator.substrate.child import describe_exit


@dataclass(frozen=True)
class Problem:
    """What is wrong with a pod.

    Attributes:
        reason: CamelCase, for conditions.
        message: for people.
        fatal: it will not go away by itself: the instance has failed.
    """

    reason: str
    message: str
    fatal: bool = False


_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_ORDINARY = frozenset({"", "ContainerCreating", "PodInitializing"})
_MODEL_REASONS = {
    WrongAddressError.reason: Reason.MODEL_NOT_FOUND,
    ModelNotFoundError.reason: Reason.MODEL_NOT_FOUND,
    AccessDeniedError.reason: Reason.MODEL_ACCESS_DENIED,
    HubUnreachableError.reason: Reason.HUB_UNREACHABLE,
    DiskFullError.reason: Reason.DISK_FULL,
    ModelUnusableError.reason: Reason.MODEL_UNUSABLE,
}
"""By the word that the init container's last message begins with."""

_MOST_CHARACTERS = 500
_ENDED = frozenset({"Failed", "Succeeded"})


def problem_of(status: Mapping[str, Any]) -> Problem | None:
    """What is wrong, by a pod's status; None when nothing is known to be."""
    is_over = status.get("phase") in _ENDED
    for name, container in _containers(status):
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None and _ends_the_pod(name, ended, is_over):
            return _ended(name, ended, status)
    if is_over:
        return Problem(_reason_of(status), _said(status) or "its pod has ended", fatal=True)
    return _unplaced(status) or _waiting(status)


def _containers(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            yield str(container.get("name")), container


def _ends_the_pod(name: str, ended: Mapping[str, Any], is_over: bool) -> bool:
    """Whether it is this container's end that ends the instance; others of a template may come and go."""
    return name == CONTAINER or (ended.get("exitCode") != 0 and (name == MODEL_CONTAINER or is_over))


def _ended(name: str, ended: Mapping[str, Any], status: Mapping[str, Any]) -> Problem:
    told = shortened(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        return Problem(
            Reason.INSTANCE_FAILING, f"{name} was killed for lack of memory (OOMKilled): raise its limit", fatal=True
        )
    said = _said(status)
    if said:
        return Problem(_reason_of(status), said, fatal=True)
    code = int(ended.get("exitCode") or 0)
    # A shell's way to tell of a signal, and the container runtime's.
    how = describe_exit(-(code - 128) if 128 < code < 128 + 65 else code)
    if name == MODEL_CONTAINER:
        return Problem(
            _model_reason(str(ended.get("message") or "")), f"the model cannot be had: {told or how}", fatal=True
        )
    return Problem(Reason.INSTANCE_FAILING, f"{how}: {told}" if told else f"its {name} {how}", fatal=True)


def _said(status: Mapping[str, Any]) -> str:
    """Why the node, or someone by way of it, has ended the pod."""
    reason, message = str(status.get("reason") or ""), shortened(str(status.get("message") or ""))
    if reason:
        return f"{reason}: {message}" if message else reason
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason')}: {shortened(str(condition.get('message') or ''))}"
    return ""


def _reason_of(status: Mapping[str, Any]) -> str:
    return str(status.get("reason") or Reason.INSTANCE_FAILING)


def _unplaced(status: Mapping[str, Any]) -> Problem | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = shortened(str(condition.get("message") or condition.get("reason") or ""))
            return Problem(_unplaced_reason(message), f"no node takes its pod: {message}")
    return None


def _unplaced_reason(message: str) -> str:
    if re.search(r"persistentvolumeclaim \S+ not found", message):
        return Reason.CLAIM_NOT_FOUND
    return Reason.CLAIM_NOT_BOUND if "unbound immediate PersistentVolumeClaims" in message else Reason.UNSCHEDULABLE


def _waiting(status: Mapping[str, Any]) -> Problem | None:
    for _, container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason in _ORDINARY:
            continue
        message = shortened(str(waiting.get("message") or ""))
        if reason in _PULLS:
            return Problem(Reason.IMAGE_PULL_FAILED, f"{container.get('image')} cannot be pulled: {message or reason}")
        return Problem(Reason.INSTANCE_FAILING, f"{reason}: {message}" if message else reason)
    return None


def _model_reason(told: str) -> str:
    word = re.match(r"(\w+):", told)
    return _MODEL_REASONS.get(word.group(1), Reason.INSTANCE_FAILING) if word else Reason.INSTANCE_FAILING


def shortened(text: str) -> str:
    """The last lines of a message: a log's end says more than its begin."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_CHARACTERS else f"...{words[-_MOST_CHARACTERS:]}"
