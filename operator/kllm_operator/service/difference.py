"""Whether an object still is what was asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_contained(wanted: Any, live: Any) -> bool:
    """Whether everything that is wanted is in what is there, which may have more: defaults, status, others' fields.

    Lists of named objects are compared by name, other lists position by position.
    """
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            is_contained(value, live.get(key, _empty_of(value))) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return isinstance(live, Sequence) and not isinstance(live, str) and _items_are_contained(wanted, live)
    # In JSON, true is not 1.
    return type(wanted) is type(live) and bool(wanted == live)


def _items_are_contained(wanted: Sequence[Any], live: Sequence[Any]) -> bool:
    if wanted and all(isinstance(each, Mapping) and "name" in each for each in (*wanted, *live)):
        named = {each["name"]: each for each in live}
        return all(is_contained(each, named.get(each["name"])) for each in wanted)
    return len(wanted) == len(live) and all(is_contained(one, other) for one, other in zip(wanted, live, strict=True))


def _empty_of(value: Any) -> Any:
    """What the server leaves out when it is told to write it."""
    return type(value)() if isinstance(value, dict | list) and not value else None
