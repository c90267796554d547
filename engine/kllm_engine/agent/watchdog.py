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
    """Failed for all who use it; it may still come back."""
    LOST = "Lost"
    """Has hung for too long; to be killed."""


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
        life: without a sign of life for so long an engine is hung.
        grace: a hung engine may come back for so long.
        step: longest step of an engine with work.
        http_suspect: silence of the HTTP server that makes an engine suspect.
        http: silence of the HTTP server after which the engine is hung.
    """

    life: float
    grace: float
    step: float
    http_suspect: float = 6.0
    http: float = 12.0


class Watchdog:
    """Verdicts on one engine, which has been hung for some time or is not."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hung_since: float | None = None

    def judge(self, seen: Observation, *, now: float) -> Verdict:
        """Verdict on what was seen at `now`, seconds on any steady clock."""
        verdict = judge(seen, self._limits)
        if verdict.health is not Health.HUNG:
            self._hung_since = None
            return verdict
        if self._hung_since is None:
            self._hung_since = now
        if now - self._hung_since < self._limits.grace:
            return verdict
        return Verdict(Health.LOST, verdict.message)


def judge(seen: Observation, limits: Limits) -> Verdict:
    """Verdict on one observation: well, suspect or hung."""
    if seen.stopped_process is not None:
        message = f"{seen.stopped_process} is stopped"
        return Verdict(Health.HUNG if seen.stopped_seconds >= limits.life else Health.SUSPECT, message)
    if seen.heartbeat_age >= limits.life:
        return Verdict(Health.HUNG, "no sign of life from its scheduler")
    if seen.has_work and seen.loop_age >= limits.step:
        return Verdict(Health.HUNG, "its scheduler's loop stands still with work to do")
    if seen.http_age >= limits.http_suspect:
        message = "its HTTP server does not answer"
        return Verdict(Health.HUNG if seen.http_age >= limits.http else Health.SUSPECT, message)
    return Verdict(Health.WELL)
