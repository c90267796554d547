"""Where this router's prompts went just now, for the others: a conversation's next turn may meet any of them. Pure.

Engines tell of blocks that they have computed, and do so late. Until then, and with engines that never tell, what is
known is to whom the prompt was given. Each router expects what it gave itself and what the others tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kllm_router.scheduling.expected import Mark

_MOST = 4000
_TOLD_SECONDS = 0.75
"""Several rounds, since one may miss some."""


class _Settled(NamedTuple):
    at: float
    instance_id: str
    marks: tuple[Mark, ...]


class Homes:
    """Marks of the prompts of this router that are told now."""

    def __init__(self) -> None:
        self._settled: deque[_Settled] = deque()
        self._marks = 0

    def settle(self, instance_id: str, marks: Sequence[Mark], now: float) -> None:
        """A prompt goes to an instance."""
        settled = _Settled(now, instance_id, tuple(marks))
        self._settled.append(settled)
        self._marks += len(settled.marks)
        self._forget(now)

    def told(self, now: float) -> dict[str, list[Mark]]:
        """What the others should hear, by instance id."""
        self._forget(now)
        told: dict[str, list[Mark]] = {}
        for each in self._settled:
            told.setdefault(each.instance_id, []).extend(each.marks)
        return told

    def _forget(self, now: float) -> None:
        while self._settled and (self._settled[0].at < now - _TOLD_SECONDS or self._marks > _MOST):
            self._marks -= len(self._settled.popleft().marks)
