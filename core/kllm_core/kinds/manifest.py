"""Reading a manifest, with errors that name the field, what was expected and the closest valid name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kllm_core.kinds.pools import DecodePool, PrefillPool
from kllm_core.kinds.service import InferenceService

MAXIMUM_BYTES = 1 << 20

Kind = TypeVar("Kind", bound=BaseModel)


class ManifestError(ValueError):
    """A manifest that cannot be served; one line per problem.

    Attributes:
        problems: "path: what is wrong", at least one.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


def read_service(path: Path) -> InferenceService:
    """Read the InferenceService in a YAML or JSON file.

    Raises:
        ManifestError: the file cannot be read, is not one YAML document, or has wrong fields.
    """
    try:
        if path.stat().st_size > MAXIMUM_BYTES:
            raise ManifestError(str(path), [f"larger than {MAXIMUM_BYTES} bytes"])
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(str(path), [f"not UTF-8 text: {error.reason} at byte {error.start}"]) from error
    except OSError as error:
        raise ManifestError(str(path), [f"cannot be read: {error.strerror}"]) from error
    return parse_service(text, source=str(path))


def parse_service(text: str, *, source: str = "manifest") -> InferenceService:
    """Parse and check one InferenceService. See `read_service`."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError(source, [f"not YAML: {' '.join(str(error).split())}"]) from error
    except RecursionError as error:
        raise ManifestError(source, ["not a manifest: nested too deeply"]) from error
    if len(documents) != 1:
        raise ManifestError(source, [f"expected one document with kind InferenceService, found {len(documents)}"])
    if not isinstance(documents[0], dict):
        raise ManifestError(source, [f"expected a mapping, found {_kind_of(documents[0])}"])
    return check_service(documents[0], source=source)


def check_service(document: Mapping[str, Any], *, source: str = "manifest") -> InferenceService:
    """Check an InferenceService, as written or as the API server returns it: its status is not looked at.

    Raises:
        ManifestError: it has wrong fields.
    """
    return _checked(InferenceService, document, source)


def check_pool(document: Mapping[str, Any], *, source: str = "manifest") -> PrefillPool | DecodePool:
    """Check a pool. See `check_service`."""
    if document.get("kind") == "DecodePool":
        return _checked(DecodePool, document, source)
    return _checked(PrefillPool, document, source)


def _checked(kind: type[Kind], document: Mapping[str, Any], source: str) -> Kind:
    try:
        return kind.model_validate({name: value for name, value in document.items() if name != "status"})
    except ValidationError as error:
        # A default that follows from a wrong field cannot be made, which is no problem of its own.
        told = (each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called")
        raise ManifestError(source, [_problem(kind, details) for details in told]) from error


def _problem(kind: type[BaseModel], details: Any) -> str:
    location: tuple[str | int, ...] = details["loc"]
    path = ".".join(str(part) for part in location) or "manifest"
    match details["type"]:
        case "extra_forbidden":
            valid = _fields_at(kind, location[:-1])
            close = difflib.get_close_matches(str(location[-1]), valid, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"valid fields are {', '.join(sorted(valid))}"
            return f"{path}: unknown field; {hint}"
        case "missing":
            return f"{path}: required field is missing"
        case "enum" | "literal_error":
            expected = details["ctx"]["expected"]
            close = difflib.get_close_matches(str(details["input"]).casefold(), _quoted_names(expected), 1, 0.5)
            hint = f"; did you mean {_quoted_names(expected)[close[0]]!r}?" if close else ""
            return f"{path}: expected {expected}, got {details['input']!r}{hint}"
        case "value_error":
            return f"{path}: {details['ctx']['error']}"
        case _:
            return f"{path}: {_lower_first(details['msg'])}, got {_shortened(details['input'])}"


def _fields_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Names of the fields of the nested model at `location`."""
    for part in location:
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        nested = _model_in(field.annotation) if field is not None else None
        if nested is None:
            return []
        model = nested
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((m for m in map(_model_in, typing.get_args(annotation)) if m is not None), None)
    return None


def _quoted_names(expected: str) -> dict[str, str]:
    """Names in pydantic's "'A', 'B' or 'C'", by their case-folded form."""
    return {name.casefold(): name for name in expected.split("'")[1::2]}


def _kind_of(value: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a string"}
    return names.get(type(value), f"a {type(value).__name__}")


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
