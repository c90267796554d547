"""PrefillPool and DecodePool: owned by an InferenceService, usable alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kllm_core.kinds.base import Metadata, Part, RoleSpec, WholeNumber
from kllm_core.kinds.service import CacheSpec, ModelSpec, ObjectivesSpec
from kllm_core.objectives import LoadSource


class PoolSpec(RoleSpec):
    """Desired state of one pool."""

    replicas: WholeNumber = Field(
        1, ge=0, le=1000, description="Instances wanted now; the scale subresource writes it."
    )
    model: ModelSpec = Field(description="What is served.")
    objectives: ObjectivesSpec = Field(description="What its users are promised.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="KV cache.")


class LoadStatus(Part):
    """Load of the pool in thousandths, since the API has no floats: 1000 is the boundary of the objective."""

    value_milli: WholeNumber | None = Field(None, ge=0, description="Max of predicted and measured.")
    predicted_milli: WholeNumber | None = Field(None, ge=0, description="From the timing model.")
    measured_milli: WholeNumber | None = Field(None, ge=0, description="Sliding percentile at the routers.")
    source: LoadSource = Field(LoadSource.UNKNOWN, description="Which of the two decided.")


class PoolStatus(Part):
    """Observed state of one pool."""

    load: LoadStatus = Field(default_factory=LoadStatus, description="Load on the scale of its objective.")
    desired: WholeNumber = Field(0, ge=0, description="Instances wanted.")
    ready: WholeNumber = Field(0, ge=0, description="Instances that serve.")
    warming: WholeNumber = Field(0, ge=0, description="Instances that are starting.")
    draining: WholeNumber = Field(0, ge=0, description="Instances that finish what they have.")
    observed_generation: WholeNumber | None = Field(
        None, ge=0, description="Generation of the spec that this reflects."
    )


class PrefillPool(Part):
    """Prefill instances of one model."""

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["PrefillPool"] = Field(description="PrefillPool")
    metadata: Metadata
    spec: PoolSpec
    status: PoolStatus = Field(default_factory=PoolStatus)


class DecodePool(Part):
    """Decode instances of one model."""

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["DecodePool"] = Field(description="DecodePool")
    metadata: Metadata
    spec: PoolSpec
    status: PoolStatus = Field(default_factory=PoolStatus)
