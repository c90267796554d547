"""An asyncio event loop that lives in simulated time: it waits by making the calls of an agenda."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from kllm.sim.agenda import Agenda


class NothingHappensError(RuntimeError):
    """A task waits for something that nothing will bring about."""


class _Agenda(selectors.SelectSelector):
    """Waits for simulated calls rather than for files, of which there is none but the loop's own pipe.

    Attributes:
        is_woken: the loop has something to do.
    """

    def __init__(self, agenda: Agenda) -> None:
        super().__init__()
        self.agenda = agenda
        self.is_woken = False

    def select(self, timeout: float | None = None) -> list[Any]:
        """Make calls until one gives the loop something to do, or until its next timer."""
        agenda = self.agenda
        if timeout is not None and timeout <= 0:
            return []
        until = math.inf if timeout is None else agenda.now + timeout
        self.is_woken = False
        while not self.is_woken:
            following = agenda.next_at
            if following is None or following > until:
                if until == math.inf:
                    raise NothingHappensError("a task waits, and nothing will happen any more")
                agenda.skip_to(until)
                break
            agenda.step()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is that of an agenda. Timers and calls come in the order of their times."""

    def __init__(self, agenda: Agenda) -> None:
        self._waiting = _Agenda(agenda)
        super().__init__(self._waiting)

    def time(self) -> float:
        """Simulated seconds."""
        return self._waiting.agenda.now

    def call_soon(  # type: ignore[override]  # its arguments are passed on as they are
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As in any loop; what waits for calls is woken."""
        self._waiting.is_woken = True
        return super().call_soon(callback, *args, context=context)


def run_virtually(work: Coroutine[Any, Any, None], agenda: Agenda) -> None:
    """Run to the end in simulated time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(agenda)) as runner:
        runner.run(work)
