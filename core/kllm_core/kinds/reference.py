"""docs/manifest.md out of the schemas: field, type, default, text, and the rules. `make generate` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kllm_core.kinds.arguments import REFUSED_ENGINE_ARGS
from kllm_core.kinds.pools import PrefillPool
from kllm_core.kinds.rules import VALIDATIONS
from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.structural import PRESERVE, structural

Schema = dict[str, Any]

_INTRODUCTION = """# InferenceService

One model with two objectives. The same file goes to `kllm up -f FILE` and `kubectl apply -f FILE`; `kllm up` refuses
fields that it cannot honour on one machine and names them. Unknown fields are refused everywhere.

`apiVersion` is `kllm.io/v1alpha1`, `kind` is `InferenceService`. `metadata.name` begins the names of all that belongs
to the service. `kubectl explain llm.spec` tells what follows as well.
"""
_TABLE = "\n| field | type | default | what |\n|---|---|---|---|\n"
_RULES = """
## What must hold

Checked by `kllm up` and, before an object is stored, by the API server. What only shows later (a claim that is not
there, a model that is not found, engine arguments that SGLang does not know) becomes a condition within seconds.

| field | rule |
|---|---|
"""
_STATUS = """
## Status

The operator writes it. Loads are in thousandths: 1000 is the boundary of the objective.
"""
_POOLS = """
## PrefillPool and DecodePool

The operator makes one of each for a service, `NAME-prefill` and `NAME-decode`. Their specs have the fields of
`spec.prefill` or `spec.decode`, and `model`, `objectives`, `cache` and `transferBackend` of the service; their statuses
have those of `status.prefill`, and `observedGeneration`, `conditions` and `revision`. And besides:
"""
_ALONE = """
One that is applied by itself is scaled by whoever writes `spec.replicas`. Its instances are of the service that its
label `kllm.io/service` names, or else of one of the pool's own name; that has one pool of each role, which agree on
`model`, `cache` and `transferBackend`, and routers of your own
([kubernetes.md](kubernetes.md#pools-without-a-service)).
"""


def markdown() -> str:
    """The reference as one page."""
    service, pool = structural(InferenceService), structural(PrefillPool)
    spec, status = service["properties"]["spec"], service["properties"]["status"]
    refused = ", ".join(f"`{name}`" for name in sorted(REFUSED_ENGINE_ARGS))
    return "".join(
        (
            _INTRODUCTION,
            _TABLE, *_rows(spec, "spec"),
            f"\nArguments that `engineArgs` must not set: {refused}.\n",
            _RULES, *_rules(service),
            _STATUS, _TABLE, *_rows(status, "status"),
            _POOLS, _TABLE, *_rows(_further(pool, "spec", spec), "spec"),
            *_rows(_further(pool, "status", status), "status"),
            _ALONE,
        )
    )  # fmt: skip


def _rows(schema: Schema, path: str) -> Iterator[str]:
    """One line a field, and those below it."""
    for name, field in schema["properties"].items():
        inner = f"{path}.{name}"
        if _twin(name, field):
            yield f"| `{inner}` | object | | {_cell(field['description'])} The same fields as `{path}.prefill`. |\n"
            continue
        yield f"| `{inner}` | {_kind(field)} | {_default(name, field, schema)} | {_cell(field['description'])} |\n"
        items = field.get("items", {})
        if "properties" in field and not field.get(PRESERVE):
            yield from _rows(field, inner)
        elif "properties" in items and not items.get(PRESERVE):
            yield from _rows(items, f"{inner}[]")


def _further(pool: Schema, name: str, service: Schema) -> Schema:
    """Fields of a pool that neither a service nor its part for one role has."""
    known = {*service["properties"], *service["properties"]["prefill"]["properties"]} - {"advised"}
    fields = pool["properties"][name]["properties"]
    return {"properties": {field: each for field, each in fields.items() if field not in known}}


def _rules(service: Schema) -> Iterator[str]:
    """One line a rule, with all fields that it holds for."""
    fields: dict[str, list[str]] = {}
    for path, message in _messages(service, ""):
        before, template, rest = path.partition(".template.")
        named = f"`…{template}{rest}`" if template else f"`{before or 'metadata.name'}`"
        if named not in fields.setdefault(message, []):
            fields[message].append(named)
    for message, names in fields.items():
        yield f"| {', '.join(names)} | {_cell(message)} |\n"


def _messages(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get(VALIDATIONS, ()):
        yield path, rule["message"]
    for name, field in schema.get("properties", {}).items():
        if not path.endswith(".engineArgs"):
            yield from _messages(field, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from _messages(schema["items"], f"{path}[]")


def _twin(name: str, field: Schema) -> bool:
    """Whether its fields are those of its neighbour, prefill."""
    return name == "decode" and "properties" in field


def _kind(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "integer":
        low, high = field["minimum"], field["maximum"]
        return f"{low} to {high}" if high < 2**53 else "whole number"
    if field.get("type") == "array":
        return "list"
    if field.get("type") == "object":
        return "object" if "properties" in field and field.get("maxProperties") is None else "map"
    return "text"


def _default(name: str, field: Schema, parent: Schema) -> str:
    if name in parent.get("required", ()):
        return "required"
    default = field.get("default")
    return "" if default is None or isinstance(default, dict) else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
