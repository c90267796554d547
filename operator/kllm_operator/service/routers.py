"""A service's routers, as far as the operator looks at them."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kllm_core.conditions import Reason
from kllm_core.labels import COMPONENT, COMPONENT_ROUTER
from kllm_operator.kube.cache import Key
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.ownership import is_ending
from kllm_operator.kube.resources import DEPLOYMENTS, PODS, Document
from kllm_operator.render.router import GRPC_PORT
from kllm_operator.service.facts import Routers
from kllm_operator.substrate.kubernetes_problems import problem_of

_ASK_SECONDS = 2.0


def addresses(caches: Caches, service: Key) -> tuple[str, ...]:
    """host:port of the gRPC servers of all routers that take requests and are not ending."""
    found = []
    for pod in _pods(caches, service):
        status = pod.get("status") or {}
        address = str(status.get("podIP") or "")
        if address and _is_ready(status) and not is_ending(pod):
            found.append(f"[{address}]:{GRPC_PORT}" if ":" in address else f"{address}:{GRPC_PORT}")
    return tuple(found)


def routers(caches: Caches, service: Key, *, knows_fleet: bool | None, unshared: str = "") -> Routers:
    """What the Deployment tells of them."""
    deployment = caches.of(DEPLOYMENTS).get(service[0], f"{service[1]}-router")
    if deployment is None:
        return Routers()
    status = deployment.get("status") or {}
    reason, message = _trouble(status) or _pod_trouble(caches, service) or (Reason.STARTING, "")
    return Routers(
        desired=int((deployment.get("spec") or {}).get("replicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        reason=reason,
        message=message,
        knows_fleet=knows_fleet,
        unshared=unshared,
    )


async def one_knows_fleet(found: tuple[str, ...]) -> bool:
    """Whether a router has found an instance of each role that takes requests; asks one after the other."""
    for address in found:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ASK_SECONDS)
            except grpc.aio.AioRpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    return False


def _is_ready(status: Document) -> bool:
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or ())


def _trouble(status: Document) -> tuple[str, str] | None:
    """Why the Deployment makes no pods, or no progress."""
    held = {each.get("type"): each for each in status.get("conditions") or ()}
    failure, progress = held.get("ReplicaFailure"), held.get("Progressing")
    if failure is not None and failure.get("status") == "True":
        return Reason.UNAVAILABLE, str(failure.get("message", ""))
    if progress is not None and progress.get("status") == "False":
        return Reason.UNAVAILABLE, str(progress.get("message", ""))
    return None


def _pod_trouble(caches: Caches, service: Key) -> tuple[str, str] | None:
    """Why one of the pods does not serve."""
    for pod in _pods(caches, service):
        problem = problem_of(pod.get("status") or {})
        if problem is not None:
            return problem.reason, f"{pod['metadata']['name']}: {problem.message}"
    return None


def _pods(caches: Caches, service: Key) -> list[Document]:
    pods = caches.of(PODS).of(*service)
    return [each for each in pods if (each["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_ROUTER]
