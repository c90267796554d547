"""What a Kubernetes API server does with an object of these kinds, as far as the schemas go.

Order as there: unknown fields, defaults, schema, and the rules only if the schema holds. The e2e tests prove the same
cases on a real API server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import cel
import jsonschema

from kllm_core.kinds.crds import DEFINITIONS
from kllm_core.kinds.structural import structural

SCHEMAS = {each.model.__name__: structural(each.model) for each in DEFINITIONS}
PRESERVE = "x-kubernetes-preserve-unknown-fields"
_ESCAPES = {"-": "__dash__", ".": "__dot__", "/": "__slash__"}


def admit(manifest: dict[str, Any], *, old: dict[str, Any] | None = None) -> list[str]:
    """Why an object, or its change, is refused, in the API server's words; empty when it is stored."""
    schema = SCHEMAS[manifest["kind"]]
    if unknown := list(_unknown(schema, manifest, "")):
        return unknown
    stored = defaulted(schema, manifest)
    if wrong := list(_wrong(schema, stored)):
        return wrong
    before = defaulted(schema, old) if old is not None else None
    return list(_broken(schema, stored, before, ""))


def defaulted(schema: dict[str, Any], given: Any) -> Any:
    """With defaults filled in, from the root down."""
    value = copy.deepcopy(given)
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value[name] = copy.deepcopy(field["default"])
            if name in value:
                value[name] = defaulted(field, value[name])
    if isinstance(value, list):
        value = [defaulted(schema.get("items", {}), item) for item in value]
    return value


def _unknown(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    if path == ".metadata":
        return
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from _unknown(schema["properties"][name], inner, f"{path}.{name}")
            elif not schema.get(PRESERVE):
                yield f'unknown field "{(path + "." + name).lstrip(".")}"'
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(schema.get("items", {}), item, f"{path}[{index}]")


def _wrong(schema: dict[str, Any], value: Any) -> Iterator[str]:
    checker = jsonschema.Draft202012Validator(_plain(schema))
    for error in checker.iter_errors(value):
        path = _path(error.absolute_path)
        match error.validator:
            case "required":
                yield f"{path}.{error.message.split(chr(39))[1]}: Required value"
            case "type":
                yield f'{path}: {path} in body must be of type {error.validator_value}: "{_kind(error.instance)}"'
            case "minimum":
                yield f"{path}: {path} in body should be greater than or equal to {error.validator_value}"
            case "maximum":
                yield f"{path}: {path} in body should be less than or equal to {error.validator_value}"
            case "enum":
                valid = ", ".join(f'"{each}"' for each in error.validator_value)
                yield f'{path}: Unsupported value: "{error.instance}": supported values: {valid}'
            case "pattern":
                yield f"{path}: {path} in body should match '{error.validator_value}'"
            case _:
                yield f"{path}: {error.message}"


def _broken(schema: dict[str, Any], value: Any, old: Any, path: str) -> Iterator[str]:
    """Rules of this part and of all below it that do not hold."""
    for rule in schema.get("x-kubernetes-validations", ()):
        about_change = re.search(r"\boldSelf\b", rule["rule"])
        if about_change and old is None:
            continue
        variables = {"self": _escaped(value)} | ({"oldSelf": _escaped(old)} if about_change else {})
        if cel.evaluate(rule["rule"], variables) is not True:
            yield f'{path.lstrip(".")}: Invalid value: "{_kind(value)}": {rule["message"]}'
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value and name != "metadata":
                before = old.get(name) if isinstance(old, dict) else None
                yield from _broken(field, value[name], before, f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken(schema["items"], item, None, f"{path}[{index}]")


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """As jsonschema understands it; its booleans are no integers, as in the API server."""
    told = {name: value for name, value in schema.items() if not name.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        told["type"] = ["integer", "string"]
    for name in ("properties", "items", "additionalProperties"):
        inner = told.get(name)
        if name == "properties" and inner is not None:
            told[name] = {field: _plain(each) for field, each in inner.items()}
        elif isinstance(inner, dict):
            told[name] = _plain(inner)
    return told


def _kind(value: Any) -> str:
    return {str: "string", float: "number", bool: "boolean", int: "integer", list: "array"}.get(type(value), "object")


def _path(parts: Any) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _escaped(value: Any) -> Any:
    """Field names as CEL sees them."""
    if isinstance(value, dict):
        return {"".join(_ESCAPES.get(c, c) for c in name): _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value
