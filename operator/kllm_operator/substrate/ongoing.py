"""Work that outlives whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Ongoing:
    """Tasks by key. Asked for again, one that goes on is joined; a waiter that is cancelled does not end it.

    Args:
        listener: called after the end of each; must not wait or raise.
    """

    def __init__(self, listener: Callable[[], object] = lambda: None) -> None:
        self._listener = listener
        self._tasks: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def has(self, what: str, name: str) -> bool:
        """Whether it goes on."""
        return (what, name) in self._tasks

    def begin(self, what: str, name: str, begin: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """The task of this key, which is begun if there is none."""
        key = (what, name)
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.ensure_future(begin())
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    async def join(self, what: str, name: str, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Wait for the end of the task of this key, which is begun if there is none."""
        return await asyncio.shield(self.begin(what, name, begin))

    async def end(self) -> None:
        """Cancel all and wait for their ends."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled():
            task.exception()  # its waiter may be gone, and nobody else would ask
        self._listener()
