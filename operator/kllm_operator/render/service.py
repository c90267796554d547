"""All objects of a service but its instances. Pure."""

from __future__ import annotations

from typing import Any

from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.render.access import router_role, service_accounts, token_secret
from kllm_operator.render.config import RenderConfig
from kllm_operator.render.network import network_policies
from kllm_operator.render.objects import owned
from kllm_operator.render.pools import pool
from kllm_operator.render.router import deployment, disruption_budget, router_service


def children(service: InferenceService, *, uid: str, config: RenderConfig) -> list[dict[str, Any]]:
    """Everything that follows from the spec, in the order in which it is applied.

    What pods need comes before what makes pods, and policies before the pods that they guard. Pools come without
    `spec.replicas`, which the planner writes, or someone else.

    Args:
        service: what is wanted.
        uid: of its object, which owns them all.
        config: the operator's part.

    Raises:
        TemplateError: the router's pod template cannot be used.
        ManifestError: the spec is too large.
    """
    documents = [
        *service_accounts(service),
        *router_role(service),
        *(pool(service, role) for role in Role),
        *([] if config.network is None else network_policies(service, config.network)),
        router_service(service),
        disruption_budget(service),
        deployment(service, config),
    ]
    return [owned(document, service, uid) for document in documents]


def fleet_token(service: InferenceService, *, uid: str, token: str) -> dict[str, Any]:
    """The secret that a service gets once.

    Args:
        service: whose it is.
        uid: of its object.
        token: what agents and engines want to be shown.
    """
    return owned(token_secret(service, token), service, uid)
