"""What the kinds share: camel-case fields, refused unknown fields, metadata, parallelism and accelerators."""

from __future__ import annotations

import enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints
from pydantic.alias_generators import to_camel

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=53)]
"""53 characters leave room for the suffixes of child objects."""

WholeNumber = Annotated[int, Strict()]
"""As the API server takes it: no fraction, no truth value, no text."""

EngineArgument = bool | int | float | str


class Part(BaseModel):
    """Any part of a manifest."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, validate_by_name=True)


class Metadata(Part):
    """The part of Kubernetes object metadata that a user writes; the rest is carried and ignored."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, validate_by_name=True)

    name: DnsLabel = Field(description="Unique in its namespace.")
    namespace: DnsLabel = Field("default", description="Where its objects live.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels for selection.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Free text for tools.")


class Parallelism(Part):
    """How one instance spreads over accelerators."""

    tensor: WholeNumber = Field(1, ge=1, le=64, description="Tensor parallel size.")
    data: WholeNumber = Field(1, ge=1, le=256, description="Data parallel size.")
    pipeline: WholeNumber = Field(
        1, ge=1, le=64, description="Pipeline parallel size. Above 1 the service binds early."
    )
    expert: WholeNumber = Field(1, ge=1, le=256, description="Expert parallel size, for mixture-of-experts models.")
    context: WholeNumber = Field(1, ge=1, le=64, description="Prefill context parallel size; decode must keep 1.")


class Accelerator(Part):
    """The accelerators of one instance."""

    resource_name: str = Field("nvidia.com/gpu", max_length=253, description="Extended resource to request.")
    count: WholeNumber = Field(1, ge=0, le=64, description="Accelerators per instance; 0 runs the engine on the CPU.")


class KvType(enum.StrEnum):
    """Element type of the KV cache."""

    AUTO = "Auto"
    BF16 = "BF16"
    FP8_E4M3 = "FP8E4M3"
    FP8_E5M2 = "FP8E5M2"


class TransferBackend(enum.StrEnum):
    """What moves KV from prefill to decode."""

    MOONCAKE = "Mooncake"
    NIXL = "NIXL"


class Scaling(enum.StrEnum):
    """Who writes the pools' replica counts."""

    SLO = "SLO"
    EXTERNAL = "External"


class RoleSpec(Part):
    """Instances of one role."""

    min_replicas: WholeNumber = Field(1, ge=0, le=1000, description="Never fewer instances than this.")
    max_replicas: WholeNumber = Field(
        default_factory=lambda given: max(1, given["min_replicas"]) if "min_replicas" in given else 1,
        ge=0,
        le=1000,
        description="Never more instances than this; left out: minReplicas, at least 1.",
    )
    slots: WholeNumber = Field(0, ge=0, le=1000, description="Pods kept ready to become instances of either role.")
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one instance spreads.")
    accelerator: Accelerator = Field(default_factory=Accelerator, description="What one instance runs on.")
    engine_args: dict[str, EngineArgument] = Field(
        default_factory=dict,
        description="Further SGLang arguments, without the leading dashes; true stands for a flag without a value. "
        "Arguments that kLLM sets itself (addresses, roles, model) are refused.",
    )
    template: dict[str, Any] | None = Field(None, description="Pod template that is merged into the instance's pod.")
