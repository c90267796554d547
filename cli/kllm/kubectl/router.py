"""What a router of a service knows of its instances, asked through the API server."""

from __future__ import annotations

from kllm.kubectl.exceptions import KubectlError
from kllm.kubectl.kubectl import Document, Kubectl

_STATUS = "/kllm/v1/status"


def told_by_router(kubectl: Kubectl, namespace: str, name: str) -> tuple[dict[str, Document], str]:
    """Instances by id as one of the routers sees them, and why they are unknown; empty when they are not."""
    path = f"/api/v1/namespaces/{namespace}/services/{name}:http/proxy{_STATUS}"
    try:
        answer = kubectl.raw(path)
    except KubectlError as error:
        return {}, f"no router of {name!r} tells its status: {error}"
    instances = answer.get("instances")
    if not isinstance(instances, list):
        return {}, f"the router of {name!r} does not tell of instances"
    return {str(each.get("id")): each for each in instances if isinstance(each, dict)}, ""
