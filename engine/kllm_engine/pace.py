"""How long steps are made to last: the words of `--pace`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kllm_core.timing import DecodeTiming, PrefillTiming

_TERM = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*(?:\+|$)")
_COEFFICIENTS = {"prefill": {"": "a", "n": "b", "q": "k"}, "decode": {"": "a", "b": "b", "c": "c"}}
"""By role: what a number is multiplied by, and the name of such a number in the timing model."""

_MEANINGS = {
    "prefill": "seconds per step, n: per new token, q: per n·(n + 2·cached)",
    "decode": "seconds per step, b: per sequence, c: per KV token",
}


T = TypeVar("T")


class PaceError(ValueError):
    """A pace that cannot be read; the message names the part."""


@dataclass(frozen=True)
class Pace:
    """Least durations of steps; None leaves steps of that kind as they are."""

    prefill: PrefillTiming | None = None
    decode: DecodeTiming | None = None

    def __str__(self) -> str:
        """The text that `parse_pace` reads back."""
        parts = []
        if self.prefill is not None:
            parts.append(f"prefill={self.prefill.a:g}+{self.prefill.b:g}n+{self.prefill.k:g}q")
        if self.decode is not None:
            parts.append(f"decode={self.decode.a:g}+{self.decode.b:g}b+{self.decode.c:g}c")
        return ",".join(parts)


def parse_pace(text: str) -> Pace:
    """Read a pace.

    Args:
        text: `prefill=0.02+0.0005n+1e-8q,decode=0.03+0.002b+1e-7c`, either part alone, terms in any order; or the same
            as JSON: `{"prefill": {"a": 0.02, "b": 0.0005, "k": 1e-8}, "decode": {"a": 0.03, "b": 0.002, "c": 1e-7}}`.

    Raises:
        PaceError: a part is unknown, is there twice, or is not made of such terms.
    """
    parts = _json_parts(text) if text.lstrip().startswith("{") else _text_parts(text)
    if not parts:
        raise PaceError("a pace needs prefill=…, decode=… or both")
    return Pace(
        prefill=_timing("prefill", parts, lambda values: PrefillTiming(values["a"], values["b"], values["k"])),
        decode=_timing("decode", parts, lambda values: DecodeTiming(values["a"], values["b"], values["c"])),
    )


def _timing(role: str, parts: Mapping[str, dict[str, float]], make: Callable[[dict[str, float]], T]) -> T | None:
    if role not in parts:
        return None
    try:
        return make(dict.fromkeys(_COEFFICIENTS[role].values(), 0.0) | parts[role])
    except ValueError as error:
        raise PaceError(f"{role}: {error}") from None


def _text_parts(text: str) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = {}
    for part in text.split(","):
        name, equals, terms = (word.strip() for word in part.partition("="))
        if not equals or name not in _COEFFICIENTS:
            raise PaceError(f"{part.strip()!r} must begin with prefill= or decode=")
        if name in parts:
            raise PaceError(f"{name} is there twice")
        parts[name] = _terms(name, terms)
    return parts


def _terms(role: str, text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    position = 0
    while position < len(text) or not values:
        term = _TERM.match(text, position)
        if term is None or (term.end() == len(text) and text.endswith("+")):
            raise PaceError(f"{role}: {text[position:]!r} is not a sum of numbers ({_MEANINGS[role]})")
        unit = term[2]
        if unit not in _COEFFICIENTS[role]:
            raise PaceError(f"{role}: unknown unit {unit!r} in {term[0].strip(' +')!r} ({_MEANINGS[role]})")
        name = _COEFFICIENTS[role][unit]
        if name in values:
            raise PaceError(f"{role}: two terms {'with ' + unit if unit else 'without a unit'}; add them up")
        values[name] = float(term[1])
        position = term.end()
    return values


def _json_parts(text: str) -> dict[str, dict[str, float]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PaceError(f"a pace that begins with a brace must be JSON: {error}") from None
    for role, values in document.items():
        if role not in _COEFFICIENTS:
            raise PaceError(f"unknown part {role!r}; there are prefill and decode")
        names = list(_COEFFICIENTS[role].values())
        if not isinstance(values, dict) or not set(values) <= set(names):
            raise PaceError(f"{role} must be an object of {', '.join(names)}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PaceError(f"{role}.{name} must be a number, got {value!r}")
    return dict(document)
