"""When what failed may be started again. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
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
    rollout_failures: int = 3
    """Failures in a row of a new revision after which it replaces nothing more, 3: two may be chance, and each costs
    accelerators for the length of a start."""
    proven_seconds: float = 10.0
    """Time for which a replacement has to serve before another one goes because of it, 10 s: two ticks. What starts
    well may still fail at its first requests."""

    def __post_init__(self) -> None:
        if self.rollout_failures < 1:
            raise ValueError(f"rollout_failures must be at least 1, got {self.rollout_failures}")


@dataclass(frozen=True)
class Pause:
    """What follows a failure.

    Attributes:
        failures: in a row, this one included.
        seconds: before the next start of the role.
        message: how it failed.
    """

    failures: int
    seconds: float
    message: str = ""

    @property
    def words(self) -> str:
        """For people."""
        if not self.seconds:
            return "is replaced at once"
        return f"is replaced in {self.seconds:.3g} s ({self.failures} failures in a row)"


@dataclass(frozen=True)
class LastFailure:
    """How a role's present revision failed last, none of which has served since.

    Attributes:
        reason: in CamelCase; empty if nothing more is known than the message.
        message: for people.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class StoppedRollout:
    """A revision that is not tried any more.

    Attributes:
        message: how it failed last.
    """

    revision: str
    message: str


@dataclass
class _Row:
    revision: str = ""
    failures: int = 0
    not_before: float = 0.0
    message: str = ""
    last: LastFailure | None = None


class Crashes:
    """Failures of each role in a row. They count for the revision that starts make now."""

    def __init__(self, settings: RestartSettings | None = None) -> None:
        self.settings = settings or RestartSettings()
        self._rows = {role: _Row() for role in Role}

    def expect(self, role: Role, revision: str) -> None:
        """From here on starts make this revision; what was known of another one says nothing of it."""
        if self._rows[role].revision != revision:
            self._rows[role] = _Row(revision)

    def recall(self, role: Role, stopped: StoppedRollout) -> None:
        """Another leader saw this revision fail too often."""
        last = LastFailure("", stopped.message)
        failures = self.settings.rollout_failures
        self._rows[role] = _Row(stopped.revision, failures, message=stopped.message, last=last)

    def forget(self) -> None:
        """A person has seen to it: try again at once."""
        self._rows = {role: _Row(row.revision) for role, row in self._rows.items()}

    def serves(self, role: Role) -> None:
        """An instance of the revision serves: how others failed before says nothing of the role's state any more."""
        self._rows[role].last = None

    def failed(self, role: Role, *, now: float, served_seconds: float, message: str = "", reason: str = "") -> Pause:
        """An instance has failed by itself after it served for so long."""
        settings, row = self.settings, self._rows[role]
        if served_seconds >= settings.restart_settled_seconds:
            row.failures, row.not_before = 0, now
        row.failures += 1
        row.message, row.last = message, LastFailure(reason, message)
        # The exponent is bounded only so that a long row of failures stays a number.
        doubled = settings.restart_first_seconds * 2.0 ** min(row.failures - 2, 32)
        seconds = 0.0 if row.failures == 1 else min(doubled, settings.restart_most_seconds)
        row.not_before = max(row.not_before, now + seconds)
        return Pause(row.failures, row.not_before - now, message)

    def held_back(self, now: float) -> Mapping[Role, Pause]:
        """Roles of which nothing may start now, and for how long."""
        held = ((role, row) for role, row in self._rows.items() if now < row.not_before)
        return {role: Pause(row.failures, row.not_before - now, row.message) for role, row in held}

    @property
    def failing(self) -> Mapping[Role, str]:
        """Roles whose present revision has failed too often, and how it failed last."""
        most = self.settings.rollout_failures
        return {role: row.message for role, row in self._rows.items() if row.failures >= most}

    @property
    def last(self) -> Mapping[Role, LastFailure]:
        """How each role's present revision failed last, as long as none of it has served since."""
        return {role: row.last for role, row in self._rows.items() if row.last is not None}

    def next_seconds(self, now: float) -> float | None:
        """Until the first of those may start; None when all may."""
        return min((pause.seconds for pause in self.held_back(now).values()), default=None)
