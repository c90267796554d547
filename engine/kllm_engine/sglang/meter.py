"""Measures steps: their durations, and rates over the time that was spent computing. Pure."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

_WINDOW_STEPS = 32


@dataclass
class StepMeter:
    """One kind of step, prefill or decode.

    Attributes:
        total_tokens: computed since the start.
        total_seconds: spent computing since the start.
        last_seconds: duration of the last step.
    """

    total_tokens: int = 0
    total_seconds: float = 0.0
    last_seconds: float = 0.0
    _recent: collections.deque[tuple[int, float]] = field(
        default_factory=lambda: collections.deque(maxlen=_WINDOW_STEPS)
    )

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        if seconds < 0:
            return
        self.total_tokens += tokens
        self.total_seconds += seconds
        self.last_seconds = seconds
        self._recent.append((tokens, seconds))

    @property
    def mean_seconds(self) -> float:
        """Mean duration of the last steps; 0 before the first."""
        return sum(seconds for _, seconds in self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Rate over the computing time of the last steps; 0 before the first."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else 0.0
