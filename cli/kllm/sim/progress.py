"""Progress of simulations: live bars on a terminal, a line every 5 s elsewhere, both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kllm.bars import bars

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_LINE_SECONDS = 5.0
_LIVE_SECONDS = 0.25


class Progress:
    """Shows how far some simulations are. A context.

    Args:
        runs: name of each, and the simulated seconds at which its load ends.
        clock: monotonic seconds.
    """

    def __init__(self, runs: Sequence[tuple[str, float]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._seen = [(0.0, 0)] * len(runs)
        self._due = clock() + _LINE_SECONDS
        self._bars: Bars | None = None
        self._tasks: list[TaskID] = []

    def __enter__(self) -> Self:
        """Show bars, on a terminal."""
        if sys.stderr.isatty():
            self._bars = bars()
            self._bars.start()
            self._tasks = [self._bars.add_task(name, total=end) for name, end in self._runs]
            self._due = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove them."""
        if self._bars is not None:
            self._bars.stop()

    def update(self, index: int, at_seconds: float, finished: int) -> None:
        """One of them is there; cheap enough to be called often.

        Args:
            index: of the run.
            at_seconds: simulated.
            finished: requests.
        """
        self._seen[index] = (at_seconds, finished)
        if self._clock() < self._due:
            return
        if self._bars is not None:
            self._due = self._clock() + _LIVE_SECONDS
            for task, (name, _), (at, ended) in zip(self._tasks, self._runs, self._seen, strict=True):
                self._bars.update(task, completed=at, description=f"{name}  {at:.0f} s  {ended} requests")
            self._bars.refresh()
        else:
            self._due = self._clock() + _LINE_SECONDS
            for line in self.lines():
                print(line, file=sys.stderr, flush=True)

    def lines(self) -> list[str]:
        """Where those are that have begun and are not at their end."""
        return [
            f"{name}: {at:.0f} of {end:.0f} s simulated, {finished} requests finished"
            for (name, end), (at, finished) in zip(self._runs, self._seen, strict=True)
            if 0 < at < end
        ]
