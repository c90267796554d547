"""Identities of a service's pods and what they may do; the token that keeps strangers from its engines. Pure."""

from __future__ import annotations

import base64
from typing import Any

from kllm_core import labels
from kllm_core.kinds.service import InferenceService
from kllm_operator.render.objects import rendered
from kllm_operator.render.permissions import ROUTER

_RBAC = "rbac.authorization.k8s.io"


def service_accounts(service: InferenceService) -> list[dict[str, Any]]:
    """Of engines, which need nothing of the API server, and of routers, whose pods ask for their token themselves."""
    return [service_account(service, component) for component in (labels.COMPONENT_ENGINE, labels.COMPONENT_ROUTER)]


def service_account(service: InferenceService, component: str) -> dict[str, Any]:
    """Of the pods of one component."""
    return rendered(
        service,
        api_version="v1",
        kind="ServiceAccount",
        name=f"{service.name}-{component}",
        component=component,
        body={"automountServiceAccountToken": False},
    )


def router_role(service: InferenceService) -> list[dict[str, Any]]:
    """Role and RoleBinding of routers."""
    name = f"{service.name}-router"
    bodies: dict[str, dict[str, Any]] = {
        "Role": {"rules": [rule.document() for rule in ROUTER]},
        "RoleBinding": {
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.metadata.namespace}],
        },
    }
    return [
        rendered(
            service,
            api_version=f"{_RBAC}/v1",
            kind=kind,
            name=name,
            component=labels.COMPONENT_ROUTER,
            body=body,
        )
        for kind, body in bodies.items()
    ]


def token_secret(service: InferenceService, token: str) -> dict[str, Any]:
    """The fleet token. It cannot be changed in place, which would part the pods that have it from those to come."""
    return rendered(
        service,
        api_version="v1",
        kind="Secret",
        name=f"{service.name}-fleet-token",
        component=labels.COMPONENT_FLEET,
        body={"type": "Opaque", "immutable": True, "data": {"token": base64.b64encode(token.encode()).decode()}},
    )
