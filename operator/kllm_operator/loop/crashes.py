"""When what failed may be started again. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Role


@dataclass(frozen=True)
class RestartSettings:
    """Pauses before a failed instance is replaced: none at first, then doubling."""

    restart_first_seconds: float = 1.0
    """Pause after the second failure in a row, 1 s: what fails twice will mostly fail again, and starts cost others
    their processor time."""
    restart_most_seconds: float = 60.0
    """Longest pause, 60 s: a cause that goes away by itself (memory, a port) costs a minute at most."""
    restart_settled_seconds: float = 60.0
    """Time for which an instance served that makes its failure a first one again, 60 s: what fails right after each
    start is a loop, what had worked is bad luck."""


@dataclass(frozen=True)
class Pause:
    """What follows a failure.

    Attributes:
        failures: in a row, this one included.
        seconds: before the next start of the role.
    """

    failures: int
    seconds: float

    @property
    def words(self) -> str:
        """For people."""
        if not self.seconds:
            return "is replaced at once"
        return f"is replaced in {self.seconds:.3g} s ({self.failures} failures in a row)"


@dataclass
class _Row:
    failures: int = 0
    not_before: float = 0.0


class Crashes:
    """Failures of each role in a row."""

    def __init__(self, settings: RestartSettings | None = None) -> None:
        self._settings = settings or RestartSettings()
        self._rows = {role: _Row() for role in Role}

    def failed(self, role: Role, *, now: float, served_seconds: float) -> Pause:
        """An instance has failed by itself after it served for so long."""
        settings, row = self._settings, self._rows[role]
        if served_seconds >= settings.restart_settled_seconds:
            row.failures, row.not_before = 0, now
        row.failures += 1
        # The exponent is bounded only so that a long row of failures stays a number.
        doubled = settings.restart_first_seconds * 2.0 ** min(row.failures - 2, 32)
        seconds = 0.0 if row.failures == 1 else min(doubled, settings.restart_most_seconds)
        row.not_before = max(row.not_before, now + seconds)
        return Pause(row.failures, row.not_before - now)

    def held_back(self, now: float) -> frozenset[Role]:
        """Roles of which nothing may start now."""
        return frozenset(role for role, row in self._rows.items() if now < row.not_before)

    def next_seconds(self, now: float) -> float | None:
        """Until the first of those may start; None when all may."""
        return min((row.not_before - now for row in self._rows.values() if now < row.not_before), default=None)
