"""One tick of a control loop: all that its planner decided from. No I/O.

As JSON, what has the value that it has by default is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kllm_core.steps import DesiredCounts
from kllm_operator.fleet.levels import LevelReport
from kllm_operator.fleet.told import Told
from kllm_operator.substrate.base import Observed

VERSION = 1

Line = TypeVar("Line")


class HistoryError(ValueError):
    """Something is no history; the text says where and why."""


@dataclass(frozen=True)
class Header:
    """The first line of a history.

    Attributes:
        service: its name.
        began_at: seconds since 1970.
        start_seconds: what a start took before; None is unknown.
    """

    kind: str
    service: str
    began_at: float
    version: int = VERSION
    start_seconds: float | None = None


@dataclass(frozen=True)
class Moment:
    """One tick.

    Attributes:
        at: seconds on the clock of the loop, that of all other times here.
        observed: all instances.
        told: what agents last said, by instance.
        levels: what routers have told since the tick before.
        complete: no router was silent.
        desired: what was carried out.
    """

    at: float
    desired: DesiredCounts
    observed: tuple[Observed, ...] = ()
    told: Mapping[str, Told] = field(default_factory=dict)
    levels: tuple[LevelReport, ...] = ()
    complete: bool = True


_HEADER = TypeAdapter(Header)
_MOMENT = TypeAdapter(Moment)


def compact(value: Any) -> Any:
    """As JSON, without what is as it is by default; numbers are kept to a millionth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: compact(held)
            for each in dataclasses.fields(value)
            if (held := getattr(value, each.name)) != _default(each)
        }
    if isinstance(value, Mapping):
        return {str(name): compact(held) for name, held in value.items()}
    if isinstance(value, tuple | list):
        return [compact(held) for held in value]
    return round(value, 6) if isinstance(value, float) else value


def parse_header(text: str) -> Header:
    """Read the first line.

    Raises:
        HistoryError: it is another one.
    """
    header = _parsed(_HEADER, text)
    if header.kind != "kllm-history" or header.version != VERSION:
        raise HistoryError(f"it is a {header.kind!r} of version {header.version}, not a kllm-history of {VERSION}")
    return header


def parse_moment(text: str) -> Moment:
    """Read any other line.

    Raises:
        HistoryError: it is no moment.
    """
    moment = _parsed(_MOMENT, text)
    if not math.isfinite(moment.at):
        raise HistoryError("at is no number of seconds")
    return moment


def _parsed(adapter: TypeAdapter[Line], text: str) -> Line:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise HistoryError(f"{place}: {message}" if place else message) from error


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return each.default
