"""What an engine says of its last steps. Pure."""

from __future__ import annotations

from collections import deque

_STEPS = 32
"""Steps that a rate is taken over, as in a real engine's report."""


class StepMeter:
    """One kind of step.

    Attributes:
        busy_seconds: of all steps.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._recent: deque[tuple[int, float, int]] = deque()
        self._tokens, self._seconds, self._steps = 0, 0.0, 0

    def add(self, tokens: int, seconds: float, *, steps: int = 1) -> None:
        """Count a step, or a row of equal ones."""
        if not steps:
            return
        self._recent.append((tokens, seconds, steps))
        self._tokens += tokens
        self._seconds += seconds
        self._steps += steps
        self.busy_seconds += seconds
        while self._steps - self._recent[0][2] >= _STEPS:
            oldest = self._recent.popleft()
            self._tokens -= oldest[0]
            self._seconds -= oldest[1]
            self._steps -= oldest[2]

    @property
    def tokens_per_second(self) -> float | None:
        """Over the time of the last steps; None before the first."""
        return self._tokens / self._seconds if self._recent and self._seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean of the last steps; None before the first."""
        return self._seconds / self._steps if self._steps else None
