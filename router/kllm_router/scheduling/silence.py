"""Whether an engine that says nothing about a request has lost it, although its agent lives. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kllm_core.fleet import EngineLoad

_STEPS = 20.0
_REPORT_SECONDS = 1.0
"""Numbers must be younger than the request by so much to know of it."""


class Awaited(enum.StrEnum):
    """What a request waits for, which says where in an engine it must be."""

    KV = "kv"
    """A prefill instance computes: it is queued or running."""
    HANDOVER = "handover"
    """A prefill instance holds its KV, or has handed it over."""
    ANSWER = "answer"
    """A decode instance makes a whole answer, or holds back what it has made."""
    TOKENS = "tokens"
    """A decode instance streams every token: it waits for its turn, or something comes."""


@dataclass(frozen=True)
class Signs:
    """What an instance shows.

    Attributes:
        load: None when it is unknown.
        age_seconds: of the load.
        stepped_seconds: since its count of generated tokens last grew; None when it never did.
    """

    load: EngineLoad | None
    age_seconds: float | None = None
    stepped_seconds: float | None = None


def has_lost(signs: Signs, *, quiet_seconds: float, awaited: Awaited) -> bool:
    """Whether a request that the engine has said nothing of for so long is no longer there.

    Args:
        signs: of the instance.
        quiet_seconds: since the request was sent, or since the last byte of its answer.
        awaited: what should have come.
    """
    load, age = signs.load, signs.age_seconds
    if load is None or age is None or age > quiet_seconds - _REPORT_SECONDS:
        return False
    if load.retracted_requests or load.running_requests is None or load.queued_requests:
        return False
    moving = load.parked_requests or load.transferring_requests
    if not load.running_requests:
        return awaited is Awaited.KV or not moving
    if awaited is not Awaited.TOKENS or moving:
        return False
    # It goes on with others, and nothing of this one waits anywhere.
    stepping = signs.stepped_seconds is not None and signs.stepped_seconds < _REPORT_SECONDS
    return stepping and quiet_seconds > _STEPS * (load.decode_step_seconds or 0.0)
