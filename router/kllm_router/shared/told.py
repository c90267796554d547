"""What a router tells the others: its share of each instance, in JSON. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from kllm_router.scheduling.share import Share
from kllm_router.shared.exceptions import ToldError

MOST_BYTES = 256 * 1024
"""Of what one router tells; 2,000 names of pods in their longest form are about 200 KiB."""
_MOST_INSTANCES = 2000
_MOST_NAME = 253
_MOST_REQUESTS = 1_000_000
_MOST_TOKENS = 1_000_000_000


@dataclass(frozen=True)
class Told:
    """What one router has told.

    Attributes:
        sequence: another one each time that it tells, so that what is merely still there is not taken for news.
        shares: by instance id; those without any are left out.
    """

    sequence: int
    shares: Mapping[str, Share]


def encode(told: Told) -> bytes:
    """Written for Redis. Of more than 2,000 instances, those with the most unreported tokens are told."""
    shares = told.shares
    if len(shares) > _MOST_INSTANCES:
        shares = dict(heapq.nlargest(_MOST_INSTANCES, shares.items(), key=lambda item: item[1].unreported_tokens))
    return orjson.dumps({"sequence": told.sequence, "instances": {name: [*share] for name, share in shares.items()}})


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
    instances = parsed.get("instances")
    if not isinstance(instances, dict) or len(instances) > _MOST_INSTANCES:
        raise ToldError(f"instances must be an object of at most {_MOST_INSTANCES}")
    return Told(parsed["sequence"], {name: _share(name, counts) for name, counts in instances.items()})


def _share(name: str, counts: Any) -> Share:
    most = (_MOST_REQUESTS, _MOST_REQUESTS, _MOST_TOKENS)
    if len(name) > _MOST_NAME or not isinstance(counts, list) or len(counts) != len(most):
        raise ToldError("each of instances must be a name and three counts")
    if not all(type(count) is int and 0 <= count <= limit for count, limit in zip(counts, most, strict=True)):
        raise ToldError(f"counts of an instance must be whole numbers from 0 to {most}")
    return Share(*counts)
