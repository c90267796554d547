"""`kubectl kllm drain` and `flip`: ask the operator something of one instance, and see what becomes of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kllm.kubectl.events import find_events
from kllm.kubectl.exceptions import NotFoundError, RefusedError
from kllm.kubectl.kubectl import PODS, Document, Kubectl
from kllm.kubectl.services import Instance, find_services, instance_of
from kllm_core import labels
from kllm_core.kinds.base import Scaling
from kllm_core.objectives import Role
from kllm_core.steps import Request

_REFUSED = "RequestRefused"
_POLL_SECONDS = 1.0


def run(
    kubectl: Kubectl,
    name: str,
    request: Request,
    *,
    timeout_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Ask, and wait until it is done; returns 0 when it is, 1 when it was refused or takes longer.

    Args:
        kubectl: the cluster.
        name: of the instance's pod.
        request: what is asked of it.
        timeout_seconds: 0 asks and does not wait.
        sleep: pauses between looks.
        clock: monotonic seconds.

    Raises:
        RefusedError: it makes no sense as things are; nothing was asked.
        PluginError: kubectl failed.
    """
    before = _sensible(kubectl, _look(kubectl, name), name, request)
    kubectl.annotate(PODS, name, f"{labels.REQUESTED}={request.value}")
    verb = "drain" if request is Request.DRAIN else "flip"
    if timeout_seconds <= 0:
        print(f"pod/{name} is asked to {verb}")
        return 0
    print(f"pod/{name} is asked to {verb} …", file=sys.stderr)
    deadline = clock() + timeout_seconds
    while clock() < deadline:
        outcome = _outcome(_look(kubectl, name), before, request)
        if outcome:
            print(f"pod/{name} {outcome}")
            return 0
        if outcome is None:
            print(f"kubectl kllm: pod/{name} was not to {verb}: {_why(kubectl, name)}", file=sys.stderr)
            return 1
        sleep(_POLL_SECONDS)
    print(
        f"kubectl kllm: pod/{name} did not {verb} within {timeout_seconds:g} s; the request stays. "
        f"kubectl kllm explain {before.service} may say what it waits for",
        file=sys.stderr,
    )
    return 1


def _look(kubectl: Kubectl, name: str) -> Document | None:
    try:
        return kubectl.get(PODS, name)
    except NotFoundError:
        return None


def _sensible(kubectl: Kubectl, pod: Document | None, name: str, request: Request) -> Instance:
    """The instance, if that may be asked of it."""
    if pod is None:
        raise RefusedError(f"there is no pod {name!r}; kubectl kllm status SERVICE lists instances")
    metadata = pod.get("metadata") or {}
    instance = instance_of(pod, {})
    if not instance.service or (metadata.get("labels") or {}).get(labels.COMPONENT) != labels.COMPONENT_ENGINE:
        raise RefusedError(f"pod {name!r} is no instance of kLLM")
    if metadata.get("deletionTimestamp"):
        raise RefusedError(f"pod {name!r} is being deleted already")
    service = find_services(kubectl, instance.service)[0]
    if service.paused:
        raise RefusedError(f"{service.name!r} is paused; first: kubectl kllm resume {service.name}")
    if request is Request.FLIP and service.scaling is Scaling.EXTERNAL:
        raise RefusedError(
            f"scaling of {service.name!r} is External: the pools' replicas say how many of each there are"
        )
    if request is Request.FLIP and instance.role not in set(Role):
        raise RefusedError(f"{name!r} is a slot and has no role to change")
    return instance


def _outcome(pod: Document | None, before: Instance, request: Request) -> str | None:
    """What has become of it; empty while it goes on, None when it was refused."""
    if pod is None:
        return "is gone" if request is Request.DRAIN else None
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        # A drain ends with the pod; one that is deleted in mid-flip has another fate.
        return "" if request is Request.DRAIN else None
    instance = instance_of(pod, {})
    if instance.requested:
        return ""
    switching = (pod["metadata"].get("annotations") or {}).get(labels.SWITCHING_TO)
    if request is Request.FLIP and instance.role != before.role:
        return "" if switching else f"is a {instance.role} instance"
    if request is Request.DRAIN and (pod["metadata"].get("annotations") or {}).get(labels.DRAIN_UNTIL):
        return ""
    return None


def _why(kubectl: Kubectl, name: str) -> str:
    told = [event for event in find_events(kubectl, set(), {name}) if event.reason == _REFUSED]
    return told[-1].message if told else "the operator has taken the request back"
