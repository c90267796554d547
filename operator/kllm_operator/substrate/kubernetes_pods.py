"""One engine pod, read from the API server's document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kllm_core import labels
from kllm_core.objectives import Role
from kllm_core.steps import Request
from kllm_operator.render.engine import AGENT_PORT, CONTAINER, MODEL_CONTAINER
from kllm_operator.substrate.base import StartPhase
from kllm_operator.substrate.kubernetes_problems import Problem, problem_of

DRAINED, OVERDUE = "true", "false"
"""What the annotation of a drain that has ended says."""


@dataclass(frozen=True)
class Pod:
    """What counts about a pod. Times are seconds since the epoch.

    Attributes:
        document: as it came; not to be changed.
        owner: uid of the controller.
        label: value of the role's label: that of a role, or of slots.
        began: when the step that made it was taken: its creation, or the start from a slot.
        drain_until: deadline of the drain that it is in; None when it does not drain.
        drained: how the drain ended; None while it goes on.
        draining_to: the role that it shall have then; None for one that leaves.
        switching_to: the role that its agent was, or will be, asked to take.
        requested: what a person has asked for by annotation.
        placed: it has a node.
        agent: host:port of its agent once it may be called.
        running_since: when the engine's container began; None while it does not run.
        fetching_since: the same of the init container that makes the model available.
        ready: the kubelet has heard that it serves.
        was_ready: it had heard so since the container began, and hears it no more.
        deleted_by: until when it must have ended; None when nobody has deleted it.
        problem: what keeps it from serving, if anything is known.
        phases: of its own start, as far as they are over; the agent tells of the rest.
    """

    document: Mapping[str, Any]
    name: str
    uid: str
    owner: str
    label: str
    revision: str
    began: float
    drain_until: float | None
    drained: bool | None
    draining_to: Role | None
    switching_to: Role | None
    requested: Request | None
    placed: bool
    agent: str | None
    running_since: float | None
    fetching_since: float | None
    ready: bool
    was_ready: bool
    deleted_by: float | None
    problem: Problem | None
    phases: tuple[StartPhase, ...]

    @property
    def is_slot(self) -> bool:
        """Whether it has no role yet."""
        return self.label == labels.ROLE_SLOT

    @property
    def drains(self) -> bool:
        """Whether it is not known yet how its drain ends."""
        return self.drain_until is not None and self.drained is None


def read_pod(document: Mapping[str, Any]) -> Pod:
    """Read a pod; what is missing or malformed in annotations counts as not there."""
    metadata = document["metadata"]
    status = document.get("status") or {}
    annotations = metadata.get("annotations") or {}
    given = metadata.get("labels") or {}
    created = seconds_of(metadata.get("creationTimestamp")) or 0.0
    running_since = _running_since(status, "containerStatuses", CONTAINER)
    return Pod(
        document=document,
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        owner=_controller(metadata),
        label=str(given.get(labels.ROLE, "")),
        revision=str(given.get(labels.REVISION, "")),
        began=seconds_of(annotations.get(labels.BEGAN_AT)) or created,
        drain_until=seconds_of(annotations.get(labels.DRAIN_UNTIL)),
        drained={DRAINED: True, OVERDUE: False}.get(annotations.get(labels.DRAINED, "")),
        draining_to=_member(Role, annotations.get(labels.DRAINING_TO)),
        switching_to=_member(Role, annotations.get(labels.SWITCHING_TO)),
        requested=_member(Request, annotations.get(labels.REQUESTED)),
        placed=bool((document.get("spec") or {}).get("nodeName")),
        agent=_agent(status) if running_since is not None else None,
        running_since=running_since,
        fetching_since=_running_since(status, "initContainerStatuses", MODEL_CONTAINER),
        ready=_since(status, "Ready") is not None,
        was_ready=running_since is not None and (_since(status, "Ready", "False") or 0.0) > running_since,
        deleted_by=seconds_of(metadata.get("deletionTimestamp")),
        problem=problem_of(status),
        # A slot's own start was over long before it got a role.
        phases=() if labels.BEGAN_AT in annotations else _phases(created, status, running_since),
    )


def seconds_of(text: object) -> float | None:
    """An RFC 3339 time as seconds since the epoch; None for anything else."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp()


def time_of(seconds: float) -> str:
    """Seconds since the epoch as an RFC 3339 time, to the millisecond."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _controller(metadata: Mapping[str, Any]) -> str:
    owners = metadata.get("ownerReferences") or ()
    return next((str(owner.get("uid", "")) for owner in owners if owner.get("controller")), "")


def _member(kind: Any, text: object) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


def _agent(status: Mapping[str, Any]) -> str | None:
    address = str(status.get("podIP") or "")
    if not address:
        return None
    return f"[{address}]:{AGENT_PORT}" if ":" in address else f"{address}:{AGENT_PORT}"


def _running_since(status: Mapping[str, Any], kind: str, name: str) -> float | None:
    for container in status.get(kind) or ():
        running = (container.get("state") or {}).get("running")
        if container.get("name") == name and running is not None:
            return seconds_of(running.get("startedAt")) or 0.0
    return None


def _since(status: Mapping[str, Any], kind: str, value: str = "True") -> float | None:
    """When a condition became true, or took another value; None if it has not."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == value:
            return seconds_of(condition.get("lastTransitionTime")) or 0.0
    return None


def _phases(created: float, status: Mapping[str, Any], running_since: float | None) -> tuple[StartPhase, ...]:
    reached = {
        "scheduled": _since(status, "PodScheduled"),
        "initialised": _since(status, "Initialized"),
        "agent": running_since,
    }
    phases, before = [], created
    for name, at in reached.items():
        if not at:
            break
        phases.append(StartPhase(name, max(0.0, at - before)))
        before = max(before, at)
    return tuple(phases)
