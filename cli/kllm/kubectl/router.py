"""What a router of a service knows of its instances, asked through the API server."""

from __future__ import annotations

from kllm.kubectl.exceptions import KubectlError
from kllm.kubectl.kubectl import Document, Kubectl
from kllm.kubectl.services import Service

_STATUS = "/kllm/v1/status"


_LEFT = "instances are shown as their pods tell, without what they do"


def told_by_router(kubectl: Kubectl, service: Service) -> tuple[dict[str, Document], str]:
    """Instances by id as one of the routers sees them, and why they are unknown; empty when they are not."""
    path = f"/api/v1/namespaces/{service.namespace}/services/{service.name}:http/proxy{_STATUS}"
    try:
        answer = kubectl.raw(path)
    except KubectlError as error:
        if service.asks_for_keys:
            # To kubectl the router's refusal looks like one of the API server, and its advice would mislead.
            why = "its routers ask for API keys, which kubectl cannot hand on"
            return {}, f"no router of {service.name!r} tells its status: {why} ({error}); {_LEFT}"
        return {}, f"no router of {service.name!r} tells its status: {error}; {_LEFT}"
    instances = answer.get("instances")
    if not isinstance(instances, list):
        return {}, f"the router of {service.name!r} does not tell of instances; {_LEFT}"
    return {str(each.get("id")): each for each in instances if isinstance(each, dict)}, ""
