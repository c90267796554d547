"""Structural schemas, as CustomResourceDefinitions want them, out of the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from kllm_core.kinds.rules import VALIDATIONS

Schema = dict[str, Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
LIST_TYPE = "x-kubernetes-list-type"
LIST_MAP_KEYS = "x-kubernetes-list-map-keys"

_INT32 = 2**31 - 1
_ORDER = (
    "description", "type", "format", "enum", "default", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "maxItems", "maxProperties", "required", "properties", "additionalProperties", "items", LIST_TYPE, LIST_MAP_KEYS,
    "x-kubernetes-int-or-string", PRESERVE, VALIDATIONS,
)  # fmt: skip
_SERVERS_OWN = {
    "apiVersion": {
        "description": "Version of the schema of this object, kllm.io/v1alpha1.",
        "type": "string",
    },
    "kind": {"description": "Kind of this object, in CamelCase.", "type": "string"},
    "metadata": {"type": "object"},
}
"""Fields of every object; the API server checks them itself."""


def structural(kind: type[BaseModel]) -> Schema:
    """Schema of a kind: without references and unions, every integer with its format, defaults at each level."""
    told = kind.model_json_schema(by_alias=True)
    root = _converted(told, told.get("$defs", {}), defaults=True)
    root["properties"] |= _SERVERS_OWN
    root["required"] = [name for name in root["required"] if name not in _SERVERS_OWN]
    status = told["properties"]["status"]
    root["properties"]["status"] = _converted(status, told["$defs"], defaults=False)
    return root


def _converted(given: Mapping[str, Any], shared: Mapping[str, Any], *, defaults: bool) -> Schema:
    """One schema and all below it.

    Args:
        given: as pydantic writes it.
        shared: its `$defs`.
        defaults: whether the API server fills in what is missing. Not in a status: what nobody wrote is not known.
    """
    schema = _inlined(given, shared)
    if "properties" in schema:
        schema["properties"] = {
            name: _property(name, schema, each, shared, defaults=defaults)
            for name, each in schema["properties"].items()
        }
    match schema.get("additionalProperties"):
        case Mapping() as values:
            schema["additionalProperties"] = _converted(values, shared, defaults=False)
        case True:
            del schema["additionalProperties"]
            schema[PRESERVE] = True
        case False:
            del schema["additionalProperties"]
    if schema.get("type") == "array":
        schema["items"] = _converted(schema["items"], shared, defaults=False)
        schema[LIST_TYPE] = "map" if LIST_MAP_KEYS in schema else "atomic"
    if schema.get("type") == "integer":
        schema["format"] = "int32" if schema.get("maximum", _INT32 + 1) <= _INT32 else "int64"
    if not defaults:
        schema.pop("default", None)
    return _ordered(schema)


def _property(
    name: str, parent: Mapping[str, Any], given: Mapping[str, Any], shared: Mapping[str, Any], *, defaults: bool
) -> Schema:
    schema = _converted(given, shared, defaults=defaults)
    optional = name not in parent.get("required", ()) and "default" not in given
    if defaults and optional and schema.get("type") == "object":
        # The API server checks a default against the rules before it fills in defaults further down, so it is whole.
        below = schema.get("properties", {})
        whole = {inner: each["default"] for inner, each in below.items() if "default" in each}
        schema = _ordered(schema | {"default": whole})
    return schema


def _ordered(schema: Schema) -> Schema:
    unknown = schema.keys() - set(_ORDER)
    if unknown:
        raise ValueError(f"a structural schema has no {', '.join(sorted(unknown))}: {schema}")
    return {name: schema[name] for name in _ORDER if name in schema}


def _inlined(given: Mapping[str, Any], shared: Mapping[str, Any]) -> Schema:
    """Without its reference, its name, and the null of what may be left out."""
    schema = {name: value for name, value in given.items() if name not in {"$defs", "title"}}
    if "anyOf" in schema:
        choices = [each for each in schema.pop("anyOf") if each != {"type": "null"}]
        if len(choices) != 1:
            raise ValueError(f"a structural schema has no unions: {given}")
        schema = _over(choices[0], schema)
        if schema.get("default", "") is None:
            del schema["default"]
    if "$ref" in schema:
        target = shared[schema.pop("$ref").removeprefix("#/$defs/")]
        return _inlined(_over(target, schema), shared)
    schema.pop("title", None)
    schema.pop("const", None)
    return schema


def _over(base: Mapping[str, Any], further: Mapping[str, Any]) -> Schema:
    """What a field says beside its type's own words; rules of both hold."""
    rules = [*base.get(VALIDATIONS, ()), *further.get(VALIDATIONS, ())]
    return {**base, **further} | ({VALIDATIONS: rules} if rules else {})
