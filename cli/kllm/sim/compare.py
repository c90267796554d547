"""Several simulations at the same time, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from typing import Any

from kllm.sim.outcome import Outcome
from kllm.sim.progress import Progress
from kllm.sim.run import simulate
from kllm.sim.scenario import Scenario, ScenarioError

_POLL_SECONDS = 0.2
_ENDING = (signal.SIGINT, signal.SIGTERM)

_shared: dict[str, Any] = {}
"""What a process was given when it began."""


@contextlib.contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; a second one ends this process as usual."""

    def heard(number: int, _: object) -> None:
        stop()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    before = {number: signal.signal(number, heard) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_jobs(scenarios: int) -> int:
    """As many as there are processors for, at most one for each."""
    return max(1, min(scenarios, len(os.sched_getaffinity(0))))


def run_all(
    scenarios: Sequence[Scenario], *, jobs: int, names: Sequence[str], complain: Callable[[str], None]
) -> list[Outcome | None]:
    """Run all, and show how far they are.

    SIGINT and SIGTERM end them early: those that had begun tell what they know, the others are None. So are those that
    could not be run.

    Args:
        scenarios: in the order of the outcomes.
        jobs: most at a time.
        names: for the display.
        complain: told of each that could not be run.
    """
    # Neither threads nor locks of this process may be copied into the new ones, as forks would.
    context = multiprocessing.get_context("spawn")
    stop, seen = context.Event(), context.Array("d", 2 * len(scenarios))
    ends = [(name, each.ends_at) for name, each in zip(names, scenarios, strict=True)]
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=jobs, mp_context=context, initializer=_begin, initargs=(stop, seen)
    )
    with pool, interruptible(stop.set), Progress(ends) as progress:
        with _signals_held():  # by the new processes, too, until `_begin` ignores them
            waiting = {pool.submit(_one, index, each): index for index, each in enumerate(scenarios)}
        while not _all_done(waiting):
            for index in range(len(scenarios)):
                progress.update(index, seen[2 * index], int(seen[2 * index + 1]))
    outcomes: list[Outcome | None] = [None] * len(scenarios)
    for future, index in waiting.items():
        try:
            outcomes[index] = future.result()
        except ScenarioError as error:
            complain(f"{names[index]}: {error}")
        except BrokenProcessPool:
            complain(f"{names[index]}: a process was killed; was there too little memory? take fewer --jobs")
    return outcomes


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end processes come when this ends; processes that begin meanwhile go on holding them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _all_done(waiting: dict[concurrent.futures.Future[Outcome | None], int]) -> bool:
    done, _ = concurrent.futures.wait(waiting, timeout=_POLL_SECONDS)
    return len(done) == len(waiting)


def _begin(stop: Event, seen: SynchronizedArray[float]) -> None:
    # A terminal sends Ctrl-C to all processes, and `timeout` its SIGTERM; the first one tells the others.
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    _shared.update(stop=stop, seen=seen)


def _one(index: int, scenario: Scenario) -> Outcome | None:
    stop, seen = _shared["stop"], _shared["seen"]
    if stop.is_set():
        return None

    def tell(at_seconds: float, finished: int) -> None:
        seen[2 * index], seen[2 * index + 1] = at_seconds, finished

    return simulate(scenario, progress=tell, stop=stop.is_set)
