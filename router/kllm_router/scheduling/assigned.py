"""Prompts that were sent to prefill instances and are not computed yet, and how busy that keeps each. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from kllm_router.scheduling.expected import Mark
from kllm_router.scheduling.prefix import PrefixMatch

_WINDOW_SECONDS = 20.0
_FORGOTTEN = 1e-3


@dataclass(frozen=True)
class Assignment:
    """One prompt on its way.

    Attributes:
        match: what the instance was believed to have of it.
        marks: of its prefix.
        tokens: to be computed.
        seconds: predicted for them.
        step_seconds: of these, what a step takes however many tokens it has.
    """

    instance_id: str
    match: PrefixMatch
    marks: tuple[Mark, ...]
    tokens: int
    seconds: float
    step_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """What grows with its tokens."""
        return max(0.0, self.seconds - self.step_seconds)


class Assigned:
    """Prompts by a key of the caller. `now` is monotonic seconds and never goes back.

    Args:
        window_seconds: within which work that was sent fades to 1/e.
    """

    def __init__(self, window_seconds: float = _WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._open: dict[Hashable, Assignment] = {}
        self._waiting: dict[str, tuple[int, float]] = {}
        self._busy: dict[str, tuple[float, float]] = {}

    def send(self, key: Hashable, assignment: Assignment, now: float) -> None:
        """A prompt is sent; one of the same key is taken back."""
        self.settle(key)
        self._open[key] = assignment
        name = assignment.instance_id
        tokens, seconds = self._waiting.get(name, (0, 0.0))
        self._waiting[name] = tokens + assignment.tokens, seconds + assignment.own_seconds
        self._busy[name] = self.pressure(name, now) * self._window + assignment.seconds, now

    def get(self, key: Hashable) -> Assignment | None:
        """What was sent and is not computed yet."""
        return self._open.get(key)

    def settle(self, key: Hashable) -> Assignment | None:
        """A prompt is computed, or has left; returns what was sent, once."""
        assignment = self._open.pop(key, None)
        if assignment is not None:
            tokens, seconds = self._waiting.get(assignment.instance_id, (0, 0.0))
            left = tokens - assignment.tokens
            if left > 0:
                self._waiting[assignment.instance_id] = left, max(0.0, seconds - assignment.own_seconds)
            else:
                self._waiting.pop(assignment.instance_id, None)
        return assignment

    def pace(self, instance_id: str) -> float | None:
        """Predicted seconds per token of what waits on an instance; None without any."""
        tokens, seconds = self._waiting.get(instance_id, (0, 0.0))
        return seconds / tokens if tokens and seconds else None

    def pressure(self, instance_id: str, now: float) -> float:
        """Share of its time that an instance needs for what it got lately; above 1 it gets more than it can do."""
        work, at = self._busy.get(instance_id, (0.0, now))
        share = work / self._window * math.exp(-(now - at) / self._window)
        return share if share > _FORGOTTEN else 0.0

    def forget(self, instance_id: str) -> None:
        """The instance has left, or is another process now."""
        for key in [key for key, each in self._open.items() if each.instance_id == instance_id]:
            del self._open[key]
        self._waiting.pop(instance_id, None)
        self._busy.pop(instance_id, None)
