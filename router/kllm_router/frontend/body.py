"""From bytes to a JSON object that cannot harm what comes after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from kllm_router.interfaces import ApiError

MAX_DEPTH = 64
"""Levels of lists and objects; parsers further on are recursive."""

_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_FLAT_FIELDS = frozenset({"prompt", "stop_token_ids", "logit_bias"})
"""Long lists of numbers that have their own checks; looking into each would only cost time."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request's body.

    Raises:
        ApiError: 400: not JSON, not an object, too deep, or with NUL characters (the field is named).
    """
    if not body.strip():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, value in parsed.items():
        if name not in _FLAT_FIELDS:
            _check_depth(name, value)
    if _ESCAPED_NUL.search(body):
        _refuse_nul(parsed)
    return parsed


def _check_depth(name: str, value: object) -> None:
    level, depth = [value], 1
    while level:
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"{name}: is nested more than {MAX_DEPTH} levels deep", param=name)


def _refuse_nul(parsed: dict[str, Any]) -> None:
    for path, text in _texts("", parsed):
        if "\0" in text:
            raise ApiError(400, f"{path}: must not contain NUL characters", param=path)


def _texts(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else key
            yield inner_path.replace("\0", "\\u0000"), key
            yield from _texts(inner_path, inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _texts(f"{path}[{i}]", inner)
