"""InferenceService: one model with two objectives."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from kllm_core.kinds.base import (
    DnsLabel,
    EngineArgument,
    KvType,
    Metadata,
    Part,
    RoleSpec,
    Scaling,
    TransferBackend,
    WholeNumber,
)
from kllm_core.objectives import Binding, Objectives

RESERVED_ENGINE_ARGS = frozenset(
    {
        "api-key", "admin-api-key", "device", "disaggregation-bootstrap-port", "disaggregation-mode",
        "disaggregation-transfer-backend", "enable-metrics", "enable-pd-role-switch", "grpc-port", "grpc-mode", "host",
        "kv-cache-dtype", "kv-events-config", "model", "model-path", "nccl-port", "optimistic-prefill-attempts",
        "page-size", "port", "served-model-name", "smg-grpc-mode", "tokenizer-path", "tp", "tp-size",
        "tensor-parallel-size", "dp", "dp-size", "pp-size", "ep-size",
    }
)  # fmt: skip
"""Arguments that follow from other fields; setting them twice could only disagree."""

_ENGINE_ARG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

DEMO_MODELS = ("smollm2-135m", "tiny-random-llama")


class ModelSpec(Part):
    """What is served."""

    uri: str = Field(
        min_length=1,
        max_length=4096,
        description="hf://ORG/NAME[@REVISION], a folder with config and safetensors, or demo://smollm2-135m.",
    )
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=253)] = Field(
        description="Name that clients give in `model`."
    )

    @field_validator("uri")
    @classmethod
    def _known_scheme(cls, uri: str) -> str:
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return uri
        if scheme == "hf" and re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", rest):
            return uri
        if scheme == "demo" and rest in DEMO_MODELS:
            return uri
        if scheme == "demo":
            raise ValueError(f"unknown demo model {rest!r}; there are {', '.join(DEMO_MODELS)}")
        if scheme == "hf":
            raise ValueError("an hf:// address is hf://ORG/NAME or hf://ORG/NAME@REVISION")
        raise ValueError(f"unknown scheme {scheme!r}; use hf://, demo:// or a folder")


class ObjectivesSpec(Part):
    """Service-level objectives, as clients see them."""

    ttft_milliseconds: WholeNumber = Field(ge=1, le=3_600_000, description="Time to first token.")
    tpot_milliseconds: WholeNumber = Field(ge=1, le=3_600_000, description="Time per output token after the first.")
    percentile: WholeNumber = Field(90, ge=1, le=99, description="Share of requests, in percent, that must meet each.")

    def objectives(self) -> Objectives:
        """The same in seconds."""
        return Objectives(self.ttft_milliseconds / 1000, self.tpot_milliseconds / 1000, self.percentile)


class RouterSpec(Part):
    """The routers of the service."""

    replicas: WholeNumber = Field(
        1, ge=1, le=100, description="Routers; each can pair any prefill and decode instance."
    )
    binding: Binding = Field(Binding.LATE, description="When the decode instance is chosen.")


class CacheSpec(Part):
    """KV cache, equal for prefill and decode."""

    page_size: WholeNumber = Field(16, ge=1, le=256, description="Tokens per KV block.")
    kv_type: KvType = Field(KvType.AUTO, description="Element type of the KV cache.")
    host_gibibytes: WholeNumber = Field(0, ge=0, le=65536, description="Host memory tier per instance; 0 turns it off.")


class ServiceSpec(Part):
    """Desired state."""

    model: ModelSpec = Field(description="What is served.")
    objectives: ObjectivesSpec = Field(description="What its users are promised.")
    gpu_budget: WholeNumber | None = Field(
        None, ge=1, le=100_000, description="Most accelerators at a time; unset: no limit."
    )
    scaling: Scaling = Field(Scaling.SLO, description="SLO: kLLM writes replica counts. External: someone else does.")
    prefill: RoleSpec = Field(default_factory=RoleSpec, description="Prefill instances.")
    decode: RoleSpec = Field(default_factory=RoleSpec, description="Decode instances.")
    router: RouterSpec = Field(default_factory=RouterSpec, description="Routers.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="KV cache.")
    transfer_backend: TransferBackend = Field(TransferBackend.MOONCAKE, description="What moves KV.")

    @field_validator("prefill", "decode")
    @classmethod
    def _role_is_sound(cls, role: RoleSpec) -> RoleSpec:
        if role.min_replicas > role.max_replicas:
            raise ValueError(f"minReplicas {role.min_replicas} is above maxReplicas {role.max_replicas}")
        _check_engine_args(role.engine_args)
        return role

    @model_validator(mode="after")
    def _roles_fit_together(self) -> Self:
        if (self.prefill.min_replicas == 0) != (self.decode.min_replicas == 0):
            raise ValueError("prefill.minReplicas and decode.minReplicas must both be 0 or both be above 0")
        if self.decode.parallelism.context != 1:
            raise ValueError("decode.parallelism.context must be 1")
        if self.gpu_budget is not None:
            needed = sum(role.min_replicas * role.accelerator.count for role in (self.prefill, self.decode))
            if needed > self.gpu_budget:
                raise ValueError(f"gpuBudget {self.gpu_budget} is below the {needed} accelerators of minReplicas")
        return self


class InferenceService(Part):
    """One model with two objectives, served by a prefill and a decode pool."""

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["InferenceService"] = Field(description="InferenceService")
    metadata: Metadata
    spec: ServiceSpec

    @property
    def name(self) -> DnsLabel:
        """Its name, unique in its namespace."""
        return self.metadata.name


def _check_engine_args(arguments: dict[str, EngineArgument]) -> None:
    for name in arguments:
        if not _ENGINE_ARG.fullmatch(name):
            raise ValueError(f"engineArgs name {name!r} must be an SGLang argument without its leading dashes")
        if name in RESERVED_ENGINE_ARGS:
            raise ValueError(f"engineArgs must not set {name!r}: kLLM sets it from other fields")
