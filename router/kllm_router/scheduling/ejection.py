"""Which instances fail too often to be given more for a while. Pure: callers bring clock and chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EjectionSettings:
    """When an instance is ejected, and for how long.

    Attributes:
        streak: failures in a row that eject.
        window: last outcomes that are kept per instance.
        least: outcomes that a share is believed from.
        share: of failures among the kept outcomes, that ejects.
        base_seconds: first ejection; each further one takes twice as long.
        most_seconds: longest ejection, before jitter.
        jitter: part of the time that is added by chance, so that instances do not come back together.
        most_of_pool: part of a pool that may be out at once; at least one instance always stays.
    """

    streak: int = 5
    window: int = 20
    least: int = 10
    share: float = 0.5
    base_seconds: float = 5.0
    most_seconds: float = 120.0
    jitter: float = 0.25
    most_of_pool: float = 0.5


@dataclass(frozen=True)
class Ejection:
    """An instance gets nothing new until then.

    Attributes:
        reason: CamelCase: FailureStreak or FailureShare.
        until: on the caller's monotonic clock.
    """

    instance_id: str
    reason: str
    message: str
    until: float


@dataclass
class _Past:
    """Outcomes of one instance."""

    outcomes: deque[bool]
    streak: int = 0
    ejections: int = 0
    ejection: Ejection | None = field(default=None)


class Outliers:
    """Remembers outcomes and ejections.

    Args:
        settings: when to eject.
        draw: gives a number from 0 to 1.
    """

    def __init__(self, settings: EjectionSettings, draw: Callable[[], float]) -> None:
        self._settings = settings
        self._draw = draw
        self._past: dict[str, _Past] = {}

    def passed(self, instance_id: str) -> None:
        """A request was served: whatever was held against the instance is healed, step by step."""
        past = self._past.get(instance_id)
        if past is None:
            return
        past.outcomes.append(True)
        past.streak = 0
        past.ejections = max(0, past.ejections - 1)
        past.ejection = None

    def failed(self, instance_id: str, now: float) -> Ejection | None:
        """A request was not served; say if that ejects the instance."""
        settings = self._settings
        past = self._past.setdefault(instance_id, _Past(deque(maxlen=settings.window)))
        past.outcomes.append(False)
        past.streak += 1
        if past.ejection is not None and past.ejection.until > now:
            return None  # what was on its way when it was ejected
        failures = past.outcomes.count(False)
        if past.streak >= settings.streak:
            reason, message = "FailureStreak", f"{past.streak} requests in a row failed"
        elif len(past.outcomes) >= settings.least and failures >= settings.share * len(past.outcomes):
            reason, message = "FailureShare", f"{failures} of the last {len(past.outcomes)} requests failed"
        else:
            return None
        seconds = min(settings.base_seconds * 2**past.ejections, settings.most_seconds)
        seconds *= 1 + settings.jitter * self._draw()
        past.ejections += 1
        past.outcomes.clear()
        past.streak = settings.streak - 1  # on its return one failure is enough
        past.ejection = Ejection(instance_id, reason, message, now + seconds)
        return past.ejection

    def forget(self, instance_id: str) -> None:
        """The instance has left, or is another process now."""
        self._past.pop(instance_id, None)

    def until(self, instance_id: str, now: float) -> float | None:
        """When its ejection ends; None when it is not ejected."""
        past = self._past.get(instance_id)
        if past is None or past.ejection is None or past.ejection.until <= now:
            return None
        return past.ejection.until

    def left_out(self, pool: Collection[str], now: float) -> frozenset[str]:
        """Those of a pool that get nothing new: never more than its part, longest ejections first.

        Args:
            pool: ids of the instances that could serve.
            now: monotonic seconds.
        """
        if not self._past:
            return frozenset()
        ejected = [(until, instance) for instance in pool if (until := self.until(instance, now)) is not None]
        most = min(int(len(pool) * self._settings.most_of_pool), len(pool) - 1)
        return frozenset(instance for _, instance in sorted(ejected, reverse=True)[: max(0, most)])
