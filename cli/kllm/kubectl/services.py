"""Services of a cluster with their pools and instances, as their objects tell."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from kllm.kubectl.exceptions import PluginError
from kllm.kubectl.kubectl import PODS, SERVICES, Document, Kubectl
from kllm_core import labels
from kllm_core.conditions import ConditionType
from kllm_core.fleet import InstanceState
from kllm_core.kinds.base import Scaling
from kllm_core.kinds.status import Condition, RoleStatus, ServiceStatus
from kllm_core.objectives import Role

_RUNNING = frozenset({InstanceState.STARTING, InstanceState.SERVING, InstanceState.DRAINING, InstanceState.SLOT})
"""States of pods that run, of which their agents know more."""


@dataclass(frozen=True)
class Service:
    """One InferenceService.

    Attributes:
        spec: as it is written.
        paused: whether somebody asked the operator to take no step.
        created: when it was made.
    """

    namespace: str
    name: str
    spec: Document
    status: ServiceStatus
    paused: bool
    created: dt.datetime | None

    @property
    def model(self) -> str:
        """Name that clients give."""
        return str(_part(self.spec, "model").get("name", "-"))

    @property
    def scaling(self) -> Scaling:
        """Who writes the pools' replica counts."""
        return Scaling.EXTERNAL if self.spec.get("scaling") == Scaling.EXTERNAL else Scaling.SLO

    @property
    def asks_for_keys(self) -> bool:
        """Whether its routers answer only those who show an API key."""
        return bool(_part(self.spec, "router").get("apiKeysSecretName"))

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if it was ever set."""
        return next((each for each in self.status.conditions if each.type == kind), None)

    def pool(self, role: Role) -> RoleStatus:
        """What is known of a role; all zero before the operator has told."""
        told = self.status.prefill if role is Role.PREFILL else self.status.decode
        return told or RoleStatus()


@dataclass(frozen=True)
class Instance:
    """One engine pod.

    Attributes:
        role: prefill, decode or slot.
        state: what its agent says, else what its pod says.
        message: why it is in that state; empty when there is nothing to say.
        load: what its engine said of itself; empty when that is unknown.
        requested: what a person asked of it; empty without.
    """

    service: str
    name: str
    role: str
    state: str
    message: str
    node: str
    address: str
    revision: str
    requested: str
    created: dt.datetime | None
    load: dict[str, Any] = field(default_factory=dict)


def find_services(kubectl: Kubectl, name: str | None = None) -> list[Service]:
    """The service of that name, or all.

    Raises:
        NotFoundError: there is none of that name.
        KubectlError: kubectl failed.
    """
    documents = kubectl.list(SERVICES) if name is None else [kubectl.get(SERVICES, name)]
    return sorted(map(_service, documents), key=lambda each: (each.namespace, each.name))


def find_instances(kubectl: Kubectl, service: Service, told: dict[str, Document]) -> list[Instance]:
    """Its engine pods, with what a router knows of them by name.

    Raises:
        KubectlError: kubectl failed.
    """
    selector = f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.COMPONENT_ENGINE}"
    pods = kubectl.list(PODS, selector=selector)
    found = [instance_of(pod, told.get(str(_part(pod, "metadata").get("name")), {})) for pod in pods]
    return sorted(found, key=lambda each: (each.role, each.name))


def instance_of(pod: Document, told: Document) -> Instance:
    """The instance in a pod, with what a router knows of it."""
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    marks, notes = _part(metadata, "labels"), _part(metadata, "annotations")
    state, message = _pod_state(pod)
    if told and state in _RUNNING:
        state, message = str(told.get("state", state)), str(told.get("message", ""))
    load = told.get("load")
    return Instance(
        service=str(marks.get(labels.SERVICE, "")),
        name=str(metadata.get("name", "")),
        role=str(marks.get(labels.ROLE, "")),
        state=state,
        message=message,
        node=str(_part(pod, "spec").get("nodeName", "")),
        address=str(status.get("podIP", "")),
        revision=str(marks.get(labels.REVISION, "")),
        requested=str(notes.get(labels.REQUESTED, "")),
        created=moment(metadata.get("creationTimestamp")),
        load=load if isinstance(load, dict) else {},
    )


def moment(text: object) -> dt.datetime | None:
    """A time as Kubernetes writes it; None when it is not one."""
    try:
        return dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _service(document: Document) -> Service:
    metadata = _part(document, "metadata")
    name = str(metadata.get("name", ""))
    try:
        status = ServiceStatus.model_validate(_part(document, "status"))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise PluginError(
            f"status.{where} of {name} is not of this version of kllm; use the one of the chart"
        ) from error
    return Service(
        namespace=str(metadata.get("namespace", "")),
        name=name,
        spec=_part(document, "spec"),
        status=status,
        paused=_part(metadata, "annotations").get(labels.PAUSED) == "true",
        created=moment(metadata.get("creationTimestamp")),
    )


def _pod_state(pod: Document) -> tuple[str, str]:
    """How `kubectl get pods` would put it, in short, and why."""
    status = _part(pod, "status")
    phase = str(status.get("phase", "Unknown"))
    if _part(pod, "metadata").get("deletionTimestamp"):
        return "Terminating", ""
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(name) or []:
            for how in ("waiting", "terminated"):
                why = _part(_part(container, "state"), how)
                reason = str(why.get("reason", ""))
                if reason and reason not in {"PodInitializing", "ContainerCreating", "Completed"}:
                    return reason, str(why.get("message", ""))
    if phase == "Running":
        return _running_state(pod), ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or phase), str(condition.get("message", ""))
    return phase, ""


def _running_state(pod: Document) -> str:
    """What the operator's marks and the kubelet say of an engine that runs, in the words of its agent."""
    metadata = _part(pod, "metadata")
    marks, notes = _part(metadata, "labels"), _part(metadata, "annotations")
    conditions = _part(pod, "status").get("conditions") or []
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
    if labels.SWITCHING_TO in notes:
        return InstanceState.STARTING.value
    if labels.DRAIN_UNTIL in notes:
        return InstanceState.DRAINING.value
    if marks.get(labels.ROLE) == labels.ROLE_SLOT:
        return InstanceState.SLOT.value
    return InstanceState.SERVING.value if ready else InstanceState.STARTING.value


def _part(document: Document, name: str) -> Document:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
