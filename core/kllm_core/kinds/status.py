"""Observed state of the kinds. Times and loads are whole numbers, since the API has no floats."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from kllm_core.kinds.base import Part, WholeNumber
from kllm_core.objectives import LoadSource

_Count = Annotated[WholeNumber, Field(ge=0, le=100_000)]
_Generation = Annotated[WholeNumber, Field(ge=0, le=2**53)]
_Milli = Annotated[WholeNumber, Field(ge=0, le=2**53)]
_Milliseconds = Annotated[WholeNumber, Field(ge=0, le=2**53)]
_Reason = Annotated[str, StringConstraints(max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
_Message = Annotated[str, StringConstraints(max_length=32768)]
_Revision = Annotated[str, StringConstraints(max_length=63)]


class StatusPart(Part):
    """Any part of a status; what a newer operator has added is ignored."""

    model_config = ConfigDict(extra="ignore")


class ConditionStatus(enum.StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusPart):
    """One condition, as in every Kubernetes status."""

    type: Annotated[str, StringConstraints(max_length=316, min_length=1)] = Field(
        description="What it is about, in CamelCase; unique in the list."
    )
    status: ConditionStatus = Field(description="Whether it holds.")
    observed_generation: _Generation | None = Field(None, description="Generation of the spec that it was set for.")
    last_transition_time: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="When `status` changed last.", json_schema_extra={"format": "date-time"}
    )
    reason: Annotated[_Reason, StringConstraints(min_length=1)] = Field(description="Why, in one CamelCase word.")
    message: _Message = Field(description="Why, for people; empty when there is nothing to add.")


Conditions = Annotated[
    tuple[Condition, ...],
    Field(max_length=32, json_schema_extra={"x-kubernetes-list-map-keys": ["type"]}),
]


class LoadStatus(StatusPart):
    """Load of the pool in thousandths: 1000 is the boundary of the objective."""

    value_milli: _Milli | None = Field(None, description="Max of predicted and measured.")
    predicted_milli: _Milli | None = Field(None, description="From the timing model.")
    measured_milli: _Milli | None = Field(None, description="Sliding percentile at the routers.")
    source: LoadSource = Field(LoadSource.UNKNOWN, description="Which of the two decided.")
    term: _Reason | None = Field(
        None, description="Part of the objective that decided, such as QueueAndPrefill, Tpot or KvHighWater."
    )


class StartPhase(StatusPart):
    """One step of an instance's start."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)] = Field(description="What was done.")
    milliseconds: _Milliseconds = Field(description="How long it took.")


class RoleStatus(StatusPart):
    """Observed instances of one role."""

    desired: _Count = Field(0, description="Instances wanted.")
    ready: _Count = Field(0, description="Instances that serve.")
    warming: _Count = Field(0, description="Instances that are starting.")
    draining: _Count = Field(0, description="Instances that finish what they have.")
    failed: _Count = Field(0, description="Instances that failed and are not replaced yet.")
    outdated: _Count = Field(0, description="Instances of another revision than the current one.")
    slots: _Count = Field(0, description="Slots that are ready to become an instance.")
    slots_warming: _Count = Field(0, description="Slots that are starting.")
    load: LoadStatus = Field(default_factory=LoadStatus, description="Load on the scale of its objective.")
    start_milliseconds: _Milliseconds | None = Field(
        None, description="From the decision until it served, of the instance that began to serve last."
    )
    start_phases: Annotated[tuple[StartPhase, ...], Field(max_length=32)] = Field(
        (), description="Phases of that start, in order."
    )


class RouterStatus(StatusPart):
    """Observed routers."""

    desired: _Count = Field(0, description="Routers wanted.")
    ready: _Count = Field(0, description="Routers that take requests.")


class PlanStatus(StatusPart):
    """Counts that the planner decided, and why."""

    prefill: _Count = Field(description="Prefill instances.")
    decode: _Count = Field(description="Decode instances.")
    reason: _Reason = Field(description="Why, in one CamelCase word.")
    message: _Message = Field(description="Why, for people, with the numbers that decided.")


class ServiceStatus(StatusPart):
    """Observed state of an InferenceService."""

    observed_generation: _Generation | None = Field(None, description="Generation of the spec that this reflects.")
    conditions: Conditions = Field((), description="Ready sums up the others.")
    url: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        None, description="Where clients in the cluster reach the service."
    )
    revision: _Revision | None = Field(None, description="Revision that the instances are brought to.")
    prefill: RoleStatus | None = Field(None, description="Prefill instances.")
    decode: RoleStatus | None = Field(None, description="Decode instances.")
    router: RouterStatus | None = Field(None, description="Routers.")
    plan: PlanStatus | None = Field(None, description="What the planner decided last.")
    advised: PlanStatus | None = Field(
        None, description="Under scaling External: what the planner would have set the pools' replicas to."
    )


class PoolStatus(RoleStatus):
    """Observed state of one pool."""

    observed_generation: _Generation | None = Field(None, description="Generation of the spec that this reflects.")
    conditions: Conditions = Field((), description="Ready sums up the others.")
    replicas: _Count = Field(0, description="Instances of this pool that exist, whatever their state.")
    selector: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        None, description="Label selector of its pods, for autoscalers."
    )
    revision: _Revision | None = Field(None, description="Revision that the instances are brought to.")
    advised: _Count | None = Field(
        None, description="Under scaling External: what the planner would have set replicas to."
    )
