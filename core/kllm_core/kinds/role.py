"""Instances of one role: how many, how each spreads, and on what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from kllm_core.kinds.arguments import EngineArguments
from kllm_core.kinds.base import MOST_INSTANCES, Part, WholeNumber
from kllm_core.kinds.rules import Rule
from kllm_core.kinds.template import PodTemplate


class Parallelism(Part):
    """How one instance spreads over accelerators."""

    rules = (
        Rule(
            cel="self.tensor % (self.data * self.context) == 0",
            message="tensor must be divisible by data times context, which split the tensor group",
            holds=lambda self: self.tensor % (self.data * self.context) == 0,
        ),
        Rule(
            cel="self.tensor % self.expert == 0",
            message="tensor must be divisible by expert: experts spread over the tensor group",
            holds=lambda self: self.tensor % self.expert == 0,
        ),
    )

    tensor: WholeNumber = Field(1, ge=1, le=64, description="Tensor parallel size.")
    data: WholeNumber = Field(1, ge=1, le=64, description="Data parallel size of attention, within the tensor group.")
    pipeline: WholeNumber = Field(
        1,
        ge=1,
        le=64,
        description="Pipeline parallel size; decode has 1 or as many as prefill. Above 1 the service binds early.",
    )
    expert: WholeNumber = Field(
        1, ge=1, le=64, description="Expert parallel size within the tensor group, for mixture-of-experts models."
    )
    context: WholeNumber = Field(
        1, ge=1, le=64, description="Prefill context parallel size, within the tensor group; decode must keep 1."
    )

    @property
    def world_size(self) -> int:
        """Accelerators that one instance needs."""
        return self.tensor * self.pipeline


class Accelerator(Part):
    """The accelerators of one instance."""

    resource_name: Annotated[
        str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
    ] = Field("nvidia.com/gpu", max_length=253, description="Extended resource to request, as DOMAIN/NAME.")
    count: WholeNumber = Field(1, ge=0, le=64, description="Accelerators per instance; 0 runs the engine on the CPU.")
    price_per_gpu_hour: WholeNumber = Field(
        1,
        ge=1,
        le=1_000_000,
        description="What one of them costs in an hour, in any unit that both roles share, such as cents: the planner "
        "tells by it what counts cost. Changing it restarts nothing.",
    )


class RoleSpec(Part):
    """Instances of one role."""

    rules = (
        Rule(
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas must not be above maxReplicas",
            holds=lambda self: self.min_replicas <= self.max_replicas,
        ),
        Rule(
            cel="self.accelerator.count == 0 || "
            "self.parallelism.tensor * self.parallelism.pipeline <= self.accelerator.count",
            message="accelerator.count must be 0 (the CPU) or at least parallelism.tensor times parallelism.pipeline",
            holds=lambda self: self.accelerator.count == 0 or self.parallelism.world_size <= self.accelerator.count,
        ),
    )

    min_replicas: WholeNumber = Field(1, ge=0, le=MOST_INSTANCES, description="Never fewer instances than this.")
    max_replicas: WholeNumber = Field(
        default_factory=lambda given: max(1, given["min_replicas"]) if "min_replicas" in given else 1,
        ge=0,
        le=MOST_INSTANCES,
        description="Never more instances than this; left out: minReplicas, at least 1.",
    )
    slots: WholeNumber = Field(
        0, ge=0, le=MOST_INSTANCES, description="Pods kept ready to become instances of either role."
    )
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one instance spreads.")
    accelerator: Accelerator = Field(default_factory=Accelerator, description="What one instance runs on.")
    engine_args: EngineArguments = Field(
        default_factory=dict,
        description="Further SGLang arguments, without the leading dashes; true stands for a flag without a value. "
        "Arguments that kLLM sets itself (addresses, roles, model, parallelism) are refused.",
    )
    template: PodTemplate | None = Field(
        None, description="Pod template that is merged into the instance's pod, whose container is `engine`."
    )


DECODE_CONTEXT = Rule(
    cel="self.parallelism.context == 1",
    message="parallelism.context must be 1 for decode: only prefill splits a prompt",
    holds=lambda self: self.parallelism.context == 1,
)
