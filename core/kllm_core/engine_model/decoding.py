"""A row of decode steps with one batch, in closed form. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kllm_core.timing import DecodeTiming

_ROUNDING = 1e-9
"""Seconds within which two moments are one: far below a step, far above the rounding of a sum of steps."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Decode steps from `at` on with a batch that stays the same.

    Step i, counted from 0, takes a + b·batch + c·(kv + i·growth), so m steps take
    m·(a + b·batch + c·kv) + c·growth·m·(m - 1)/2.

    Attributes:
        at: when the first step begins, in seconds.
        batch: sequences, at least 1.
        kv_tokens: that the first step reads.
        growth: KV tokens that each step adds: accept length times batch.
        first_seconds: what the first step takes.
        more_seconds: by how much each step takes longer than the one before.
    """

    at: float
    batch: int
    kv_tokens: float
    growth: float
    first_seconds: float
    more_seconds: float

    @classmethod
    def of(cls, timing: DecodeTiming, *, at: float, batch: int, kv_tokens: float, accept_length: float) -> DecodeRun:
        """The run of a batch."""
        growth = batch * accept_length
        first = timing.a + timing.b * batch + timing.c * kv_tokens
        return cls(at, batch, kv_tokens, growth, first, timing.c * growth)

    def ends(self, steps: int) -> float:
        """When so many steps are over."""
        return self.at + steps * self.first_seconds + self.more_seconds * (steps * (steps - 1) / 2)

    def steps_before(self, moment: float) -> int:
        """Steps that are over at a moment."""
        elapsed = moment - self.at + _ROUNDING
        if elapsed < self.first_seconds:
            return 0
        # m·f + g·m(m - 1)/2 = elapsed, solved for m in the form that stays exact for a small g.
        slope = self.first_seconds - self.more_seconds / 2
        steps = math.floor(2 * elapsed / (slope + math.sqrt(slope * slope + 2 * self.more_seconds * elapsed)))
        # The root is rounded; the sum decides.
        while self.ends(steps) > moment + _ROUNDING:
            steps -= 1
        while self.ends(steps + 1) <= moment + _ROUNDING:
            steps += 1
        return steps

    def boundary(self, moment: float) -> int:
        """Steps that are over at the first end of a step that is not before a moment; 0: the run's beginning."""
        steps = self.steps_before(moment)
        return steps if self.ends(steps) >= moment - _ROUNDING else steps + 1
