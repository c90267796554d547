"""Workers of one router add up what their clients saw, since the operator hears only one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson
import structlog

from kllm_router.service_levels import ServiceLevels, Totals

if TYPE_CHECKING:
    from kllm_router.shared.folder import Folder

_KIND = "levels"
_INTERVAL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 0.5
_GONE_SECONDS = 2.0
"""A worker that told nothing for so long has nobody waiting; what its clients saw still counts."""

_log = structlog.get_logger(__name__)


class LevelsExchange:
    """One worker's part. What workers left that have ended stays, so that sums never fall.

    Args:
        folder: where the workers tell.
        levels: of this worker.
        clock: monotonic seconds, the same for all processes of a machine.
    """

    def __init__(self, folder: Folder, levels: ServiceLevels, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._levels = levels
        self._clock = clock
        self._told: list[float] = []
        self._told_at = 0.0

    async def run(self) -> None:
        """Exchange until cancelled."""
        problem = ""
        while True:
            try:
                self.exchange()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if problem != (problem := str(error)):
                    _log.warning("what clients of all workers saw is not known", reason=problem)
            await asyncio.sleep(_INTERVAL_SECONDS)

    def exchange(self) -> None:
        """Tell and hear once.

        Raises:
            OSError: the folder cannot be used.
            ValueError: a worker left something else, as do KeyError and TypeError.
        """
        self._tell(self._clock())
        total, waiting = Totals(), 0
        for data in self._folder.others(_KIND).values():
            told = orjson.loads(data)
            total = total.plus(Totals.of(told["numbers"]))
            if self._clock() - told["at"] <= _GONE_SECONDS:
                waiting += told["waiting"]
        levels = self._levels
        hurried = waiting > levels.others_waiting
        levels.others, levels.others_waiting = total, waiting
        if hurried:
            levels.hurry()

    def _tell(self, now: float) -> None:
        numbers, waiting = self._levels.own.numbers(), self._levels.waiting_here()
        told = [*numbers, waiting]
        if told != self._told or now - self._told_at >= _HEARTBEAT_SECONDS:
            self._folder.write(_KIND, orjson.dumps({"at": now, "waiting": waiting, "numbers": numbers}))
            self._told, self._told_at = told, now
