"""Plays everyone else in the cluster: scheduler, kubelets and the Deployment controller. No container runs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from cluster_api import MERGE, ClusterApi

from kllm_core.labels import COMPONENT, COMPONENT_ENGINE, COMPONENT_ROUTER

_START_SECONDS = 0.5
"""From the node to a container that runs, and from there to ready."""


class Nodes:
    """Nodes without end, of which each pod gets an address of its own in 127.0.0.0/8.

    Attributes:
        pods: that are there, by uid.
        changes: writes that the nodes and controllers made.

    Args:
        api: the API server.
    """

    def __init__(self, api: ClusterApi) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.changes = 0
        self._api = api
        self._begun: set[str] = set()
        self._made: dict[str, int] = {}
        self._of_deployments: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Play until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_pods())
                group.create_task(self._watch_deployments())
        finally:
            for task in self._tasks:
                task.cancel()

    def engines(self, service: str) -> list[dict[str, Any]]:
        """Engine pods of a service."""
        return [pod for pod in self.pods.values() if pod["metadata"]["name"].startswith(f"{service}-engine-")]

    async def fail(self, pod: dict[str, Any]) -> None:
        """End a pod's container with an error, as a crash does."""
        state = {"terminated": {"exitCode": 1, "reason": "Error", "message": "killed by the benchmark"}}
        status = {"phase": "Failed", "conditions": [], "containerStatuses": [_container(pod, state, ready=False)]}
        await self._set(pod, status)

    async def _watch_pods(self) -> None:
        async for kind, pod in self._api.watch("/api/v1/pods"):
            uid = pod["metadata"]["uid"]
            siblings = self._of_deployments.setdefault(_deployment_of(pod), {})
            if kind == "DELETED":
                self.pods.pop(uid, None)
                siblings.pop(uid, None)
                continue
            self.pods[uid] = siblings[uid] = pod
            if pod["metadata"].get("deletionTimestamp"):
                self._once(f"end {uid}", self._end(pod))
            else:
                self._once(f"run {uid}", self._run(pod))

    async def _watch_deployments(self) -> None:
        async for kind, deployment in self._api.watch("/apis/apps/v1/deployments"):
            generation = deployment["metadata"]["generation"]
            observed = (deployment.get("status") or {}).get("observedGeneration", 0)
            if kind != "DELETED" and observed < generation:
                self._once(f"deploy {deployment['metadata']['uid']} {generation}", self._deploy(deployment))

    def _once(self, key: str, work: Any) -> None:
        if key in self._begun:
            work.close()
            return
        self._begun.add(key)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        self._number += 1
        number = self._number
        address = f"127.{64 + (number >> 16)}.{(number >> 8) & 255}.{number & 255}"
        binding = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": f"node-{number % 250}"},
        }  # fmt: skip
        await self._write("POST", f"{_path(pod)}/binding", binding)
        await asyncio.sleep(_START_SECONDS)
        running = _container(pod, {"running": {"startedAt": _now()}}, ready=False)
        begun = [_condition("PodScheduled"), _condition("Initialized")]
        status = {"podIP": address, "podIPs": [{"ip": address}], "startTime": _now(), "phase": "Running"}
        await self._set(pod, {**status, "conditions": begun, "containerStatuses": [running]})
        await asyncio.sleep(_START_SECONDS)
        ready = [*begun, _condition("ContainersReady"), _condition("Ready")]
        await self._set(pod, {"conditions": ready, "containerStatuses": [{**running, "ready": True}]})

    async def _end(self, pod: dict[str, Any]) -> None:
        await self._write("DELETE", f"{_path(pod)}?gracePeriodSeconds=0")

    async def _deploy(self, deployment: dict[str, Any]) -> None:
        """Make a Deployment's pods, and tell that they are ready once they are."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        for _ in range(spec["replicas"] - self._made.get(metadata["uid"], 0)):
            self._made[metadata["uid"]] = number = self._made.get(metadata["uid"], 0) + 1
            template = spec["template"]
            pod = {
                "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
                "metadata": {
                    **template["metadata"], "name": f"{metadata['name']}-{number}", "namespace": metadata["namespace"],
                },
            }  # fmt: skip
            await self._write("POST", f"/api/v1/namespaces/{metadata['namespace']}/pods", pod)
        while not self._are_ready(metadata, spec["replicas"]):  # noqa: ASYNC110  of many pods, none of which is awaited
            await asyncio.sleep(_START_SECONDS)
        count = spec["replicas"]
        status = {
            "observedGeneration": metadata["generation"], "replicas": count, "updatedReplicas": count,
            "readyReplicas": count, "availableReplicas": count,
        }  # fmt: skip
        path = f"/apis/apps/v1/namespaces/{metadata['namespace']}/deployments/{metadata['name']}/status"
        await self._write("PATCH", path, {"status": status})

    def _are_ready(self, metadata: dict[str, Any], wanted: int) -> bool:
        pods = self._of_deployments.get((metadata["namespace"], metadata["name"]), {})
        return sum(is_ready(pod) for pod in pods.values()) >= wanted

    async def _set(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        await self._write("PATCH", f"{_path(pod)}/status", {"status": status})

    async def _write(self, method: str, path: str, body: object = None) -> None:
        self.changes += 1
        kind = MERGE if method == "PATCH" else "application/json"
        # What is gone meanwhile needs nothing more.
        await self._api.ask(method, path, body, kind=kind, may_be=(404, 409))


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready and stays."""
    held = (pod.get("status") or {}).get("conditions") or ()
    is_true = any(each["type"] == "Ready" and each["status"] == "True" for each in held)
    return is_true and not pod["metadata"].get("deletionTimestamp")


def is_engine(pod: dict[str, Any]) -> bool:
    """Whether a pod is an instance, and no router."""
    return bool((pod["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_ENGINE)


def _container(pod: dict[str, Any], state: dict[str, Any], *, ready: bool) -> dict[str, Any]:
    name = "engine" if is_engine(pod) else COMPONENT_ROUTER
    return {"name": name, "image": "x", "imageID": "x", "restartCount": 0, "ready": ready, "state": state}


def _condition(kind: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "lastTransitionTime": _now()}


def _deployment_of(pod: dict[str, Any]) -> tuple[str, str]:
    """Namespace and name, if it is one's; of an engine pod those of none."""
    metadata = pod["metadata"]
    return metadata["namespace"], metadata["name"].rpartition("-")[0]


def _path(pod: dict[str, Any]) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
