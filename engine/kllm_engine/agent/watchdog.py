"""Decides whether a running engine is well. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Health(enum.Enum):
    """What to do with an engine."""

    WELL = "Well"
    SUSPECT = "Suspect"
    """Not ready, but it may come back."""
    HUNG = "Hung"
    """Will not come back; to be killed."""


@dataclass(frozen=True)
class Verdict:
    """Health and why."""

    health: Health
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What was seen of an engine.

    Attributes:
        heartbeat_age: seconds since the last heartbeat came.
        loop_age: seconds since the scheduler began its last iteration, as of now.
        http_age: seconds since the HTTP server last said that it is ready.
        has_work: the engine has requests.
        stopped_process: one that is in state T (stopped by a signal), or None.
        stopped_seconds: for how long.
    """

    heartbeat_age: float
    loop_age: float
    http_age: float
    has_work: bool
    stopped_process: str | None = None
    stopped_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient to be, in seconds.

    Attributes:
        heartbeat: silence that makes an engine suspect; after twice that it is hung.
        step: longest step of an engine with work.
        http_suspect: silence of the HTTP server that makes an engine suspect.
        http: silence of the HTTP server after which the engine is hung.
    """

    heartbeat: float
    step: float
    http_suspect: float = 15.0
    http: float = 45.0


def judge(seen: Observation, limits: Limits) -> Verdict:
    """Verdict on one observation."""
    if seen.stopped_process is not None:
        message = f"{seen.stopped_process} is stopped"
        return Verdict(Health.HUNG if seen.stopped_seconds >= limits.heartbeat else Health.SUSPECT, message)
    if seen.heartbeat_age >= limits.heartbeat:
        message = f"no heartbeat for {seen.heartbeat_age:.1f} s"
        return Verdict(Health.HUNG if seen.heartbeat_age >= 2 * limits.heartbeat else Health.SUSPECT, message)
    if seen.has_work and seen.loop_age >= limits.step:
        return Verdict(Health.HUNG, f"the scheduler's loop has stood still for {seen.loop_age:.0f} s with work to do")
    if seen.http_age >= limits.http_suspect:
        message = f"its HTTP server has not been ready for {seen.http_age:.0f} s"
        return Verdict(Health.HUNG if seen.http_age >= limits.http else Health.SUSPECT, message)
    return Verdict(Health.WELL)
