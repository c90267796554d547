"""Pools that people apply by themselves: each as one half of a service, and what the pools of a service share. Pure.

A pool's pods are those that a service of the same role would have. The routers of such a service are its users' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kllm_core import labels
from kllm_core.kinds.base import Metadata, Scaling
from kllm_core.kinds.pools import DecodePool, PrefillPool
from kllm_core.kinds.role import RoleSpec
from kllm_core.kinds.service import InferenceService, RolloutSpec, RouterSpec, ServiceSpec
from kllm_core.kinds.status import ServiceStatus
from kllm_core.objectives import Role
from kllm_operator.render.access import service_account, token_secret
from kllm_operator.render.config import NetworkConfig
from kllm_operator.render.network import network_policies
from kllm_operator.render.objects import of_owners
from kllm_operator.render.owner import Owner


def half_of(name: str, pool: PrefillPool | DecodePool) -> InferenceService:
    """The service as its one pool has it: of the other role there is nothing, and others write the count.

    It is not checked as a whole: what a service needs of both roles is no matter of one.

    Args:
        name: of the service.
        pool: its pool.
    """
    spec = pool.spec
    role = Role.PREFILL if isinstance(pool, PrefillPool) else Role.DECODE
    own = RoleSpec(**{field: getattr(spec, field) for field in RoleSpec.model_fields})
    none = RoleSpec(min_replicas=0, max_replicas=0)
    whole = ServiceSpec.model_construct(
        model=spec.model,
        objectives=spec.objectives,
        scaling=Scaling.EXTERNAL,
        prefill=own if role is Role.PREFILL else none,
        decode=own if role is Role.DECODE else none,
        router=RouterSpec(),
        rollout=RolloutSpec(),
        cache=spec.cache,
        transfer_backend=spec.transfer_backend,
    )
    return InferenceService.model_construct(
        api_version="kllm.io/v1alpha1",
        kind="InferenceService",
        metadata=Metadata(name=name, namespace=pool.metadata.namespace),
        spec=whole,
        status=ServiceStatus(),
    )


def account(service: InferenceService, pools: Sequence[Owner]) -> dict[str, Any]:
    """The account of the engines, which all pools of the service own: it goes with the last of them.

    Whoever has it holds the service's name. It owns what else they share, since the token's secret is never written
    again and so cannot go from one pool to the next.
    """
    references = sorted((each.share() for each in pools), key=lambda each: str(each["uid"]))
    return of_owners(service_account(service, labels.COMPONENT_ENGINE), references)


def policies(service: InferenceService, config: NetworkConfig | None, *, uid: str) -> list[dict[str, Any]]:
    """Who may call the engines.

    Args:
        service: whose engines they are.
        config: None renders none.
        uid: of the account.
    """
    engines = [] if config is None else network_policies(service, config)[:1]
    return [_of_account(each, service, uid) for each in engines]


def shared_token(service: InferenceService, *, uid: str, token: str) -> dict[str, Any]:
    """The secret that the pools of a service get once.

    Args:
        service: whose it is.
        uid: of the account.
        token: what agents and engines want to be shown.
    """
    return _of_account(token_secret(service, token), service, uid)


def _of_account(document: dict[str, Any], service: InferenceService, uid: str) -> dict[str, Any]:
    name = service_account(service, labels.COMPONENT_ENGINE)["metadata"]["name"]
    owner = Owner("v1", "ServiceAccount", name, uid, waits=False)
    return of_owners(document, [owner.reference()])
