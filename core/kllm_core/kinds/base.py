"""What the kinds share: camel-case fields, refused unknown fields, metadata, and closed sets of words."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, Strict, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kllm_core.kinds.rules import VALIDATIONS, Rule

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]

WholeNumber = Annotated[int, Strict()]
"""As the API server takes it: no fraction, no truth value, no text."""

MOST_INSTANCES = 1000


class Part(BaseModel):
    """Any part of a manifest.

    Attributes:
        rules: what holds between its fields.
    """

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, validate_by_name=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    def document(self) -> dict[str, Any]:
        """As in a manifest; fields that are unset are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        broken = [rule.message for rule in self.rules if rule.holds is not None and not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        told = handler.resolve_ref_schema(handler(schema))
        return told | {VALIDATIONS: [rule.validation for rule in cls.rules]} if cls.rules else told


class Metadata(Part):
    """The part of Kubernetes object metadata that a user writes; the rest is carried and ignored."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Unique in its namespace."
    )
    namespace: DnsLabel = Field("default", description="Where its objects live.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels for selection.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Free text for tools.")


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


def name_rule(most: int) -> Rule:
    """How an object may be named whose name begins the names of its child objects."""
    label = "^[a-z]([-a-z0-9]*[a-z0-9])?$"

    def holds(kind: Any) -> bool:
        name = kind.metadata.name
        return len(name) <= most and re.fullmatch(label, name) is not None

    return Rule(
        cel=f"size(self.metadata.name) <= {most} && self.metadata.name.matches('{label}')",
        message=f"metadata.name must be at most {most} of a-z, 0-9 and '-', begin with a letter and not end with '-'",
        holds=holds,
    )
