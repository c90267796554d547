"""What a router tells the others: what it has on instances, what keys have taken, where prompts went. JSON. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from kllm_router.scheduling.expected import Mark
from kllm_router.scheduling.quota import Spent
from kllm_router.scheduling.share import Share
from kllm_router.shared.exceptions import ToldError

MOST_BYTES = 512 * 1024
"""Of what one router tells: 2,000 names of pods in their longest form are about 200 KiB, the rest together no more."""
_MOST_INSTANCES = 2000
_MOST_KEYS = 1000
_MOST_MARKS = 4096
_MOST_NAME = 253
_MOST_COUNT = 1_000_000
_MOST_TOKENS = 1_000_000_000_000
_MOST_HASH = 2**64 - 1
_COUNTS = (_MOST_COUNT, _MOST_COUNT, _MOST_TOKENS)

_Counts = TypeVar("_Counts", Share, Spent)


@dataclass(frozen=True)
class Told:
    """What one router has told.

    Attributes:
        sequence: another one each time that it tells, so that what is merely still there is not taken for news.
        shares: by instance id; those without any are left out.
        spent: by the name of a key; those that have taken nothing are left out.
        homes: by instance id: beginnings of prompts that went there just now.
    """

    sequence: int = 0
    shares: Mapping[str, Share] = field(default_factory=dict)
    spent: Mapping[str, Spent] = field(default_factory=dict)
    homes: Mapping[str, Sequence[Mark]] = field(default_factory=dict)


def encode(told: Told) -> bytes:
    """Written for others. Above their bounds, the instances and keys with the most tokens are told."""
    shares = _largest(told.shares, _MOST_INSTANCES, lambda share: share.unreported_tokens)
    spent = _largest(told.spent, _MOST_KEYS, lambda taken: taken.tokens)
    document = {
        "sequence": told.sequence,
        "instances": {name: [*share] for name, share in shares.items()},
        "keys": {name: [*taken] for name, taken in spent.items()},
        "homes": {name: [number for mark in marks for number in mark] for name, marks in told.homes.items()},
    }
    return orjson.dumps(document)


def decode(data: bytes) -> Told:
    """Read what `encode` wrote.

    Raises:
        ToldError: it is of another form; the message names the field.
    """
    if len(data) > MOST_BYTES:
        raise ToldError(f"larger than {MOST_BYTES} bytes")
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ToldError(f"not JSON: {error}") from error
    if not isinstance(parsed, dict) or type(parsed.get("sequence")) is not int:
        raise ToldError("sequence must be a whole number")
    shares = _named(parsed, "instances", _MOST_INSTANCES, lambda counts: Share(*_counts("instances", counts)))
    spent = _named(parsed, "keys", _MOST_KEYS, lambda counts: Spent(*_counts("keys", counts)))
    homes = _named(parsed, "homes", _MOST_INSTANCES, _marks)
    if sum(map(len, homes.values())) > _MOST_MARKS:
        raise ToldError(f"homes must be at most {_MOST_MARKS}")
    return Told(parsed["sequence"], shares, spent, homes)


_Value = TypeVar("_Value")


def _named(parsed: dict[str, Any], field_name: str, most: int, read: Callable[[Any], _Value]) -> dict[str, _Value]:
    told = parsed.get(field_name)
    if not isinstance(told, dict) or len(told) > most:
        raise ToldError(f"{field_name} must be an object of at most {most}")
    if any(len(name) > _MOST_NAME for name in told):
        raise ToldError(f"names of {field_name} must have at most {_MOST_NAME} characters")
    return {name: read(value) for name, value in told.items()}


def _counts(field_name: str, counts: Any) -> list[int]:
    if not isinstance(counts, list) or len(counts) != len(_COUNTS):
        raise ToldError(f"each of {field_name} must be a name and three counts")
    if not all(type(count) is int and 0 <= count <= limit for count, limit in zip(counts, _COUNTS, strict=True)):
        raise ToldError(f"counts of {field_name} must be whole numbers from 0 to {_COUNTS}")
    return counts


def _marks(numbers: Any) -> list[Mark]:
    if not isinstance(numbers, list) or len(numbers) % 2 or len(numbers) > 2 * _MOST_MARKS:
        raise ToldError("each of homes must be a name and pairs of numbers")
    if not all(type(number) is int and 0 <= number <= _MOST_HASH for number in numbers):
        raise ToldError(f"numbers of homes must be whole ones from 0 to {_MOST_HASH}")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _largest(counts: Mapping[str, _Counts], most: int, size: Callable[[_Counts], int]) -> Mapping[str, _Counts]:
    if len(counts) <= most:
        return counts
    return dict(heapq.nlargest(most, counts.items(), key=lambda item: size(item[1])))
