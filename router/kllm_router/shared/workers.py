"""Workers of one router tell each other what routers tell each other through Redis, through files in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from kllm_router.shared.exceptions import ToldError
from kllm_router.shared.outbox import Outbox
from kllm_router.shared.peers import OnHome, Peers
from kllm_router.shared.told import Told, decode

if TYPE_CHECKING:
    from kllm_router.scheduling.quota import Spent
    from kllm_router.scheduling.share import Share
    from kllm_router.shared.folder import Folder

_KIND = "told"
_INTERVAL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 0.3
_FORGET_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class WorkerShares:
    """Implements `kllm_router.interfaces.SharedLoad`. Belongs to one event loop.

    Args:
        folder: where the workers tell.
        on_home: told where the others' prompts went.
        clock: monotonic seconds; that of whoever asks.
    """

    def __init__(self, folder: Folder, *, on_home: OnHome, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._peers = Peers(_FORGET_SECONDS, on_home)
        self._outbox = Outbox(_HEARTBEAT_SECONDS)
        self._problem = ""

    def of(self, instance_id: str, now: float) -> Share:
        """See `SharedLoad`."""
        return self._peers.of(instance_id, now)

    def spent(self, key: str, now: float) -> Spent:
        """See `SharedLoad`."""
        return self._peers.spent(key, now)

    def status(self) -> dict[str, Any] | None:
        """See `SharedLoad`."""
        return {
            "up": not self._problem,
            "address": "workers",
            "problem": self._problem,
            "routers": len(self._peers),
        }

    def unshared(self) -> str:
        """Why the others are not heard; empty when they are."""
        return self._problem

    async def run(self, own: Callable[[], Told]) -> None:
        """Exchange until cancelled; `own` gives what this worker has to tell, whatever the sequence in it."""
        try:
            while True:
                try:
                    self.exchange(own())
                except OSError as error:
                    self._failed(str(error))
                else:
                    self._problem = ""
                await asyncio.sleep(_INTERVAL_SECONDS)
        finally:
            self._folder.remove(_KIND)

    def exchange(self, own: Told) -> None:
        """Tell and hear once.

        Raises:
            OSError: the folder cannot be used.
        """
        now = self._clock()
        try:
            if (data := self._outbox.due(own, now)) is not None:
                self._folder.write(_KIND, data)
            for name, data in self._folder.others(_KIND).items():
                self._hear(name, data, now)
        finally:
            self._peers.settle(now)

    def _hear(self, name: str, data: bytes, now: float) -> None:
        try:
            self._peers.hear(name, decode(data), now)
        except ToldError as error:
            _log.warning("what another worker told is not understood", worker=name, reason=str(error))

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("load is not shared with other workers", reason=problem)
