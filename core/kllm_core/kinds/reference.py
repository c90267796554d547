"""docs/manifest.md out of the models: field, type, default, text. `make generate` writes it."""

from __future__ import annotations

import enum
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kllm_core.kinds.service import RESERVED_ENGINE_ARGS, InferenceService

_INTRODUCTION = """# InferenceService

One model with two objectives. The same file goes to `kllm up -f FILE` and `kubectl apply -f FILE`; `kllm up` refuses
fields that it cannot honour on one machine and names them. Unknown fields are refused everywhere.

| field | type | default | what |
|---|---|---|---|
"""


def markdown() -> str:
    """The reference as one page."""
    rows = "".join(f"| `{path}` | {kind} | {default} | {text} |\n" for path, kind, default, text in _rows())
    reserved = ", ".join(f"`{name}`" for name in sorted(RESERVED_ENGINE_ARGS))
    return f"{_INTRODUCTION}{rows}\nArguments that `engineArgs` must not set: {reserved}.\n"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    yield from _fields(InferenceService, "")


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        text = (field.description or "").replace("|", "\\|")
        nested = _nested(field.annotation)
        if nested is None:
            yield path, _kind(field), _default(field), text
        else:
            yield path, "object", "required" if field.is_required() else "", text
            yield from _fields(nested, f"{path}.")


def _nested(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _kind(field: FieldInfo) -> str:
    annotation = field.annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if annotation is int:
        low = next((rule.ge for rule in field.metadata if isinstance(rule, annotated_types.Ge)), None)
        high = next((rule.le for rule in field.metadata if isinstance(rule, annotated_types.Le)), None)
        return f"{low} to {high}" if low is not None and high is not None else "whole number"
    if typing.get_origin(annotation) is dict:
        return "map"
    return "text"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "unset"
    if field.default is PydanticUndefined:
        return ""
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
