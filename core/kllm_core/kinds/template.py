"""Pod templates in manifests: carried as they are written, apart from what kLLM must keep to itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, model_serializer

from kllm_core.kinds.base import Part
from kllm_core.kinds.rules import Rule

OWN_CONTAINERS = ("engine", "model", "router")
OWN_VARIABLES = ("POD_IP", "POD_NAME", "SGLANG_HOST_IP")

_BY_NAME: dict[str, JsonValue] = {"x-kubernetes-list-map-keys": ["name"]}
_Word = Annotated[str, StringConstraints(max_length=4096)]
_Words = Annotated[list[_Word], Field(max_length=256)]


class OpenPart(Part):
    """A part of a pod: fields that it does not name are carried as they are."""

    model_config = ConfigDict(extra="allow")

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        # Kubernetes tells an empty list, null and a field that is not there apart, so nothing is added or dropped.
        fields = type(self).model_fields
        told = {fields[name].alias or name: getattr(self, name) for name in fields if name in self.model_fields_set}
        return told | (self.model_extra or {})


class EnvironmentVariable(OpenPart):
    """One environment variable; any of its fields."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(description="Name of the variable.")


class ContainerPort(OpenPart):
    """One port; any of its fields."""


class Container(OpenPart):
    """One container, merged by name; any of its fields."""

    rules = (
        Rule(
            cel=f"!(self.name in {list(OWN_CONTAINERS)}) || !(has(self.command) || has(self.args) || has(self.ports))",
            message="command, args and ports of the containers engine, model and router are kLLM's; leave them out",
            holds=lambda self: (
                self.name not in OWN_CONTAINERS or (self.command is None and self.args is None and self.ports is None)
            ),
        ),
        Rule(
            cel=f"!(self.name in {list(OWN_CONTAINERS)}) || !has(self.env) || "
            f"!self.env.exists(each, each.name in {list(OWN_VARIABLES)})",
            message=f"env of the containers engine, model and router must not set {', '.join(OWN_VARIABLES)}",
            holds=lambda self: (
                self.name not in OWN_CONTAINERS or not any(each.name in OWN_VARIABLES for each in self.env or ())
            ),
        ),
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)] = Field(
        description="engine or router for kLLM's own container; any other name adds one."
    )
    command: _Words | None = Field(None, description="Of further containers only.")
    args: _Words | None = Field(None, description="Of further containers only; see engineArgs.")
    ports: Annotated[list[ContainerPort], Field(max_length=64)] | None = Field(
        None, description="Of further containers only."
    )
    env: Annotated[list[EnvironmentVariable], Field(max_length=256)] | None = Field(
        None, description="Environment variables, merged by name.", json_schema_extra=_BY_NAME
    )


_Containers = Annotated[list[Container], Field(max_length=32)]


class TemplateSpec(OpenPart):
    """Fields of the pod, as in Kubernetes."""

    containers: _Containers | None = Field(None, description="Containers, merged by name.", json_schema_extra=_BY_NAME)
    init_containers: _Containers | None = Field(
        None, description="Init containers, merged by name.", json_schema_extra=_BY_NAME
    )


class TemplateMetadata(Part):
    """Labels and annotations of the pod."""

    labels: Annotated[dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)] | None = Field(
        None, description="Further labels of the pod."
    )
    annotations: Annotated[dict[str, _Word], Field(max_length=64)] | None = Field(
        None, description="Further annotations of the pod."
    )


class PodTemplate(Part):
    """What is merged into a pod."""

    metadata: TemplateMetadata | None = Field(None, description="Labels and annotations of the pod.")
    spec: TemplateSpec | None = Field(
        None, description="Fields of the pod, as in Kubernetes: containers and volumes are merged by name."
    )
