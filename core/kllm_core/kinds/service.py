"""InferenceService: one model with two objectives."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kllm_core.kinds.base import KvType, Metadata, Part, Scaling, TransferBackend, WholeNumber, name_rule
from kllm_core.kinds.model import ModelSpec
from kllm_core.kinds.role import DECODE_CONTEXT, RoleSpec
from kllm_core.kinds.rules import Rule, unchangeable
from kllm_core.kinds.status import ServiceStatus
from kllm_core.kinds.template import PodTemplate
from kllm_core.labels import ENGINE_TIMING
from kllm_core.objectives import Binding, Objectives, Role
from kllm_core.timing import EngineTiming, parse_timing

_PAIRING = "instances of before and after the change could not pair while it is rolled out"


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
    binding: Binding = Field(
        Binding.LATE,
        description="When the decode instance is chosen: Late after prefill, Early on arrival, JustInTime when the "
        "rest of the prefill takes as long as the handshake.",
    )
    api_keys_secret_name: (
        Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)] | None
    ) = Field(
        None,
        description="Secret whose entry `keys` holds the keys that clients may use, one a line; left out: no key is "
        "needed. Routers read it when they start.",
    )
    wait_for_start_seconds: WholeNumber | None = Field(
        None,
        ge=0,
        le=3600,
        description="For how long a request that comes while no instance serves waits for one to start; 0: it gets 503 "
        "at once. Left out: 600 where minReplicas are 0, otherwise 0.",
    )
    template: PodTemplate | None = Field(
        None, description="Pod template that is merged into the router's pod, whose container is `router`."
    )


class RolloutSpec(Part):
    """How instances are replaced after a change of the spec."""

    rules = (
        Rule(
            cel="self.surge > 0 || self.maxUnavailable > 0",
            message="surge and maxUnavailable must not both be 0: nothing could be replaced",
            holds=lambda self: self.surge > 0 or self.max_unavailable > 0,
        ),
    )

    surge: WholeNumber = Field(
        1, ge=0, le=100, description="Most instances above the wanted ones of both roles together, within gpuBudget."
    )
    max_unavailable: WholeNumber = Field(
        0,
        ge=0,
        le=100,
        description="How many fewer than minReplicas of a role may serve; for a gpuBudget without room for one more.",
    )


_WAIT_FOR_START_SECONDS = 600
"""Where a service may be at zero: longer than an engine takes to start, and what clients wait at most by default."""

_NO_HOST_TIER = Rule(
    cel="self == 0",
    message="cache.hostGibibytes must be 0: no instance keeps KV in host memory yet; leave it out",
    holds=lambda self: self == 0,
)


class CacheSpec(Part):
    """KV cache, equal for prefill and decode."""

    page_size: Annotated[WholeNumber, unchangeable("cache.pageSize", _PAIRING)] = Field(
        16, ge=1, le=256, description="Tokens per KV block, of prefill and decode alike. It cannot be changed."
    )
    kv_type: Annotated[KvType, unchangeable("cache.kvType", _PAIRING)] = Field(
        KvType.AUTO, description="Element type of the KV cache, of prefill and decode alike. It cannot be changed."
    )
    host_gibibytes: Annotated[WholeNumber, _NO_HOST_TIER] = Field(
        0, ge=0, le=65536, description="Host memory tier per instance; not available yet, so that 0 is the only value."
    )


Transfer = Annotated[TransferBackend, unchangeable("transferBackend", _PAIRING)]


class ServiceSpec(Part):
    """Desired state."""

    rules = (
        Rule(
            cel="(self.prefill.minReplicas == 0) == (self.decode.minReplicas == 0)",
            message="prefill.minReplicas and decode.minReplicas must both be 0 or both be above 0",
            holds=lambda self: (self.prefill.min_replicas == 0) == (self.decode.min_replicas == 0),
        ),
        Rule(
            cel="self.decode.parallelism.pipeline in [1, self.prefill.parallelism.pipeline]",
            message="decode.parallelism.pipeline must be 1 or equal to prefill.parallelism.pipeline",
            holds=lambda self: self.decode.parallelism.pipeline in {1, self.prefill.parallelism.pipeline},
        ),
        Rule(
            cel="!has(self.gpuBudget) || self.prefill.minReplicas * self.prefill.accelerator.count + "
            "self.decode.minReplicas * self.decode.accelerator.count <= self.gpuBudget",
            message="gpuBudget must be at least minReplicas times accelerator.count of prefill and decode together",
            holds=lambda self: (
                self.gpu_budget is None
                or sum(role.min_replicas * role.accelerator.count for role in (self.prefill, self.decode))
                <= self.gpu_budget
            ),
        ),
    )

    model: ModelSpec = Field(description="What is served.")
    objectives: ObjectivesSpec = Field(description="What its users are promised.")
    gpu_budget: WholeNumber | None = Field(
        None, ge=1, le=100_000, description="Most accelerators at a time; unset: no limit."
    )
    scaling: Scaling = Field(
        Scaling.SLO,
        description="SLO: kLLM writes the pools' replicas. External: someone else does (HPA, KEDA, kubectl scale), and "
        "the planner only advises.",
    )
    prefill: RoleSpec = Field(default_factory=RoleSpec, description="Prefill instances.")
    decode: Annotated[RoleSpec, DECODE_CONTEXT] = Field(default_factory=RoleSpec, description="Decode instances.")
    router: RouterSpec = Field(default_factory=RouterSpec, description="Routers.")
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec, description="How instances are replaced after a change of the spec."
    )
    cache: CacheSpec = Field(default_factory=CacheSpec, description="KV cache.")
    transfer_backend: Transfer = Field(
        TransferBackend.MOONCAKE, description="What moves KV from prefill to decode. It cannot be changed."
    )

    def role(self, role: Role) -> RoleSpec:
        """Instances of one role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def wait_for_start_seconds(self) -> int:
        """For how long a request that comes while no instance serves waits for one to start."""
        if self.router.wait_for_start_seconds is not None:
            return self.router.wait_for_start_seconds
        return _WAIT_FOR_START_SECONDS if self.prefill.min_replicas == 0 else 0


class InferenceService(Part):
    """One model with two objectives, served by a prefill and a decode pool."""

    rules = (name_rule(40),)

    api_version: Literal["kllm.io/v1alpha1"] = Field(description="kllm.io/v1alpha1")
    kind: Literal["InferenceService"] = Field(description="InferenceService")
    metadata: Metadata = Field(description="Name, namespace, labels and annotations.")
    spec: ServiceSpec = Field(description="Desired state.")
    status: ServiceStatus = Field(default_factory=ServiceStatus, description="Observed state; the operator writes it.")

    @property
    def name(self) -> str:
        """Its name, unique in its namespace."""
        return self.metadata.name

    @property
    def timing(self) -> EngineTiming | None:
        """Timing of its engines, if an annotation tells it."""
        text = self.metadata.annotations.get(ENGINE_TIMING)
        return None if text is None else parse_timing(text)

    @model_validator(mode="after")
    def _tells_a_timing_that_can_be_read(self) -> Self:
        try:
            _ = self.timing
        except ValueError as error:
            raise ValueError(f"metadata.annotations.{ENGINE_TIMING}: {error}") from error
        return self
