"""A queue of keys for workers that look at the whole state of a key each time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from kllm_operator.kube.exceptions import KubeError

K = TypeVar("K", bound=Hashable)

_log = structlog.get_logger(__name__)


class QueueObserver(Protocol):
    """Hears of what goes through a queue."""

    def waited(self, seconds: float) -> None:
        """A key was taken after it had waited for so long."""

    def worked(self, seconds: float, *, failed: bool) -> None:
        """Work on a key has ended."""


class _Silent:
    def waited(self, seconds: float) -> None:
        del seconds

    def worked(self, seconds: float, *, failed: bool) -> None:
        del seconds, failed


@dataclass(frozen=True)
class Backoff:
    """Pauses after failures of one key in a row."""

    first_seconds: float = 0.5
    """After the first, 0.5 s: most causes (a conflict, an object on its way out) are over by then."""
    most_seconds: float = 60.0
    """At most, 60 s: a cause that people remove is noticed within a minute without any event."""

    def seconds(self, failures: int) -> float:
        """After so many failures in a row, at least 1."""
        # The exponent is bounded only so that the power stays a number.
        return min(self.most_seconds, self.first_seconds * 2.0 ** min(failures - 1, 32))


class WorkQueue(Generic[K]):
    """Keys that want work, each at most once. Belongs to one event loop.

    A key is worked on by one worker at a time; added meanwhile, it is worked on once more afterwards. What `work`
    returns is the time in seconds until the key is wanted again without any event, or None. If it raises, the key
    comes again after a pause that doubles with each failure in a row, and earlier if something adds it.

    Args:
        work: on one key.
        workers: keys at the same time.
        backoff: after failures.
        observer: hears of waiting and working times.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        workers: int = 8,
        backoff: Backoff | None = None,
        observer: QueueObserver | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._work, self._workers = work, workers
        self._backoff, self._observer = backoff or Backoff(), observer or _Silent()
        self._ready: dict[K, float] = {}
        self._active: dict[K, float] = {}
        self._again: dict[K, float] = {}
        self._later: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()
        self._taken_at: float | None = None

    def __len__(self) -> int:
        """Keys that want work now; those with a time are not among them."""
        return len(self._ready) + len(self._again)

    @property
    def longest_seconds(self) -> float:
        """For how long the oldest work that goes on has lasted; 0 without any."""
        now = asyncio.get_running_loop().time()
        return max((now - began for began in self._active.values()), default=0.0)

    @property
    def stalled_seconds(self) -> float:
        """For how long keys have waited without any being taken; 0 if none waits, and while nobody works."""
        if self._taken_at is None or not self._ready:
            return 0.0
        return asyncio.get_running_loop().time() - max(self._taken_at, min(self._ready.values()))

    def add(self, key: K) -> None:
        """Want work on a key now."""
        now = asyncio.get_running_loop().time()
        self._unschedule(key)
        if key in self._active:
            self._again.setdefault(key, now)
        elif key not in self._ready:
            self._ready[key] = now
            self._wake.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Want work on a key in a while; of two times the earlier counts."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        held = self._later.get(key)
        if key in self._ready or key in self._again or (held is not None and held.when() <= loop.time() + seconds):
            return
        self._unschedule(key)
        self._later[key] = loop.call_later(seconds, self.add, key)

    async def run(self) -> None:
        """Work until cancelled. What is begun then is cancelled too, and its key is forgotten."""
        self._taken_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._workers):
                    group.create_task(self._worker(), name=f"worker {number}")
        finally:
            self._taken_at = None
            for key in list(self._later):
                self._unschedule(key)

    async def _worker(self) -> None:
        while True:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
            key = next(iter(self._ready))
            added = self._ready.pop(key)
            began = self._taken_at = self._active[key] = asyncio.get_running_loop().time()
            self._observer.waited(began - added)
            failed, pause = await self._try(key)
            self._observer.worked(asyncio.get_running_loop().time() - began, failed=failed)
            del self._active[key]
            if (since := self._again.pop(key, None)) is not None:
                self._ready[key] = since
                self._wake.set()
            elif pause is not None:
                self.add_after(key, pause)

    async def _try(self, key: K) -> tuple[bool, float | None]:
        """Work on a key; whether that failed, and when it is wanted again."""
        try:
            pause = await self._work(key)
        except Exception as error:  # noqa: BLE001  whatever it is, the other keys are not to suffer, and it is tried again
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            pause = self._backoff.seconds(failures)
            _log.warning(
                "WorkFailed", key=key, failures=failures, again_seconds=pause, kind=type(error).__name__,
                error=str(error), exc_info=not isinstance(error, KubeError),
            )  # fmt: skip
            return True, pause
        self._failures.pop(key, None)
        return False, pause

    def _unschedule(self, key: K) -> None:
        held = self._later.pop(key, None)
        if held is not None:
            held.cancel()
