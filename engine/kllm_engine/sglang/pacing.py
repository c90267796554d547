"""Makes SGLang's steps last as long as a timing model says, so that a small model behaves like a large one.

A step is computed as always; the rest of its time is slept, as the scheduler's thread would wait for a GPU. It never
becomes shorter. What the scheduler does between two steps counts as part of the second, as with overlapped scheduling,
and a sleep that took too long is made up for by the next one: a busy engine keeps the model's rate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kllm_engine.pace import Pace

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class PaceTally:
    """What came of it.

    Attributes:
        steps: that were paced.
        late_steps: those of them that were computed only when their time was over: the machine is too slow.
        late_seconds: by which they were late, together.
    """

    steps: int = 0
    late_steps: int = 0
    late_seconds: float = 0.0


class Pacer:
    """Paces the steps of one scheduler.

    Args:
        pace: the model.
        clock: seconds, monotonic.
        sleep: waits so many seconds without using the processor.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pace = pace
        self.tally = PaceTally()
        self._clock = clock
        self._sleep = sleep
        self._ended: float | None = None

    def step(self, batch: Any, *, after_idle: bool, compute: Callable[[], T]) -> T:
        """Compute a step and wait for the end of its time.

        Args:
            batch: SGLang's ScheduleBatch.
            after_idle: the scheduler had nothing to compute before; else the step began when the last one ended.
            compute: does the work.
        """
        seconds = modelled_seconds(self.pace, batch)
        if seconds is None:
            return compute()
        began = self._clock() if after_idle or self._ended is None else self._ended
        result = compute()
        self._wait(began + seconds, seconds)
        return result

    def _wait(self, end: float, seconds: float) -> None:
        self.tally.steps += 1
        rest = end - self._clock()
        if rest > 0:
            self._sleep(rest)
            self._ended = end
            return
        self._ended = end - rest
        if not self.tally.late_steps:
            _log.warning("a step of %.4f s took %.4f s: this machine cannot keep the pace", seconds, seconds - rest)
        self.tally.late_steps += 1
        self.tally.late_seconds -= rest


def modelled_seconds(pace: Pace, batch: Any) -> float | None:
    """How long a step should take; None for one that is not paced, as it computes nothing or has no model."""
    mode = batch.forward_mode
    if mode.is_prebuilt() or mode.is_idle():
        return None
    if mode.is_decode() or mode.is_target_verify():
        kv_tokens = int(batch.seq_lens_cpu.sum())
        return None if pace.decode is None else pace.decode.seconds(len(batch.reqs), kv_tokens)
    if pace.prefill is None or not mode.is_extend():
        return None
    return pace.prefill.batch_seconds(zip(batch.extend_lens, batch.prefix_lens, strict=True))
