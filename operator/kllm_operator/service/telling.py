"""What a control loop tells, as Kubernetes events, log lines and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from kllm_core.objectives import Role
from kllm_core.steps import Drain, Flip, Prepare, Start
from kllm_operator.kube.resources import PODS
from kllm_operator.loop.events import (
    CountsNotWritten,
    Ended,
    Event,
    Failed,
    Planned,
    Requested,
    Rollout,
    Serving,
    Stepped,
)
from kllm_operator.service.cluster import Cluster

_log = structlog.get_logger(__name__)


class Teller:
    """Tells of one service.

    Args:
        cluster: where to.
        service: the service's object as it is now.
    """

    def __init__(self, cluster: Cluster, service: Callable[[], Mapping[str, Any]]) -> None:
        self._cluster = cluster
        self._service = service

    def tell(self, event: Event) -> None:
        """Take one event of the loop. Does not wait or raise."""
        metadata = self._service()["metadata"]
        _log.info(
            "LoopTold", namespace=metadata["namespace"], service=metadata["name"], about=event.name, line=event.line
        )
        if isinstance(event, Planned):
            self._planned(event)
        elif isinstance(event, Stepped) and isinstance(event.step, Start | Prepare):
            # What becomes of it is told as Serving or Failed.
            self._count(event.step, "done")
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, Serving):
            # The pod itself tells it by its readiness.
            self._say("", "InstanceServing", event.line, "Start")
        elif isinstance(event, Failed):
            self._say(event.instance_id, "InstanceFailed", event.line, "Serve", warning=True)
        elif isinstance(event, Requested):
            reason = "RequestAccepted" if event.accepted else "RequestRefused"
            self._say(event.instance_id, reason, event.message, str(event.request), warning=not event.accepted)
        elif isinstance(event, Rollout):
            self._say("", event.reason, f"{event.role}: {event.message}", "RollOut", warning=True)
        elif isinstance(event, CountsNotWritten):
            self._say("", "CountsNotWritten", event.line, "Scale", warning=True)

    def _planned(self, event: Planned) -> None:
        before = event.before
        if event.advise_only or before is None:
            return
        if any(before.of(role) != event.desired.of(role) for role in Role):
            self._say("", event.desired.reason, event.line, "Scale")

    def _ended(self, event: Ended) -> None:
        step = event.step
        self._count(step, "failed" if event.error else "done")
        if event.error:
            self._say(event.instance_id, "StepFailed", event.line, type(step).__name__, warning=True)
        elif isinstance(step, Flip | Drain):
            reason = "Flipped" if isinstance(step, Flip) else "Drained"
            self._say(event.instance_id, reason, event.line, type(step).__name__)

    def _count(self, step: object, outcome: str) -> None:
        self._cluster.metrics.decisions.labels(type(step).__name__.lower(), outcome).inc()

    def _say(self, instance_id: str, reason: str, note: str, action: str, *, warning: bool = False) -> None:
        service = self._service()
        pod = self._cluster.caches.of(PODS).get(service["metadata"]["namespace"], instance_id) if instance_id else None
        for about in (service, *([pod] if pod is not None else [])):
            self._cluster.recorder.tell(about, reason=reason, note=note, action=action, warning=warning)
