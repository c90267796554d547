"""PrefillPool and DecodePool: owned by an InferenceService, usable alone."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from kllm_core.kinds.base import MOST_INSTANCES, Metadata, Part, TransferBackend, WholeNumber, name_rule
from kllm_core.kinds.model import ModelSpec
from kllm_core.kinds.role import DECODE_CONTEXT, RoleSpec
from kllm_core.kinds.service import CacheSpec, ObjectivesSpec, ServiceSpec, Transfer
from kllm_core.kinds.status import PoolStatus
from kllm_core.objectives import Role

_NAME = name_rule(48)
_SPEC = (
    "Desired state. An InferenceService writes that of its own pools. A pool that is applied by itself is scaled by "
    "whoever writes replicas; its instances are of the service that its label kllm.io/service names, or else of one of "
    "the pool's own name, which has one pool of each role and routers of your own."
)


class PoolSpec(RoleSpec):
    """Desired state of one pool.

    No rule ties replicas to minReplicas and maxReplicas: autoscalers write the one and the operator the others, and
    neither may be refused because the other has not written yet. The operator bounds what it acts on.
    """

    replicas: WholeNumber = Field(
        1,
        ge=0,
        le=MOST_INSTANCES,
        description="Instances wanted now; the scale subresource writes it. Bounded by minReplicas and maxReplicas. "
        "Of a pool without an InferenceService it is yours, or an autoscaler's, to write.",
    )
    model: ModelSpec = Field(description="What is served.")
    objectives: ObjectivesSpec = Field(description="What its users are promised.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="KV cache.")
    transfer_backend: Transfer = Field(
        TransferBackend.MOONCAKE, description="What moves KV from prefill to decode. It cannot be changed."
    )

    @classmethod
    def of(cls, service: ServiceSpec, role: Role) -> Self:
        """The pool of one role of a service, with as few instances as may be."""
        side = service.role(role)
        shared = {name: getattr(service, name) for name in ("model", "objectives", "cache", "transfer_backend")}
        own = {name: getattr(side, name) for name in RoleSpec.model_fields}
        return cls(replicas=side.min_replicas, **own, **shared)


class PrefillPool(Part):
    """Prefill instances of one model."""

    rules = (_NAME,)

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["PrefillPool"] = Field(description="PrefillPool")
    metadata: Metadata = Field(description="Name, namespace, labels and annotations.")
    spec: PoolSpec = Field(description=_SPEC)
    status: PoolStatus = Field(default_factory=PoolStatus, description="Observed state; the operator writes it.")


class DecodePool(Part):
    """Decode instances of one model."""

    rules = (_NAME,)

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["DecodePool"] = Field(description="DecodePool")
    metadata: Metadata = Field(description="Name, namespace, labels and annotations.")
    spec: Annotated[PoolSpec, DECODE_CONTEXT] = Field(description=_SPEC)
    status: PoolStatus = Field(default_factory=PoolStatus, description="Observed state; the operator writes it.")
