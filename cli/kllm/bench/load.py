"""Sends a plan in open loop: each request at its time, whatever became of those before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from kllm.bench.plan import Planned
from kllm.bench.row import Row, Status

Prepare = Callable[[Planned], bytes]
Ask = Callable[[bytes, Row, Callable[[], float]], Awaitable[None]]


class Load:
    """One run of a plan.

    Args:
        plan: sorted by time.
        prepare: makes the body of a request, shortly before its time.
        ask: sends a body and writes what happens into the row.
        max_in_flight: a request that would be one more is not sent, and counts as rejected.
        drain: seconds that answers may take after the last request was sent.

    Attributes:
        rows: of the requests whose time has come.
    """

    def __init__(
        self, plan: Sequence[Planned], *, prepare: Prepare, ask: Ask, max_in_flight: int, drain: float
    ) -> None:
        self.plan = plan
        self.rows: list[Row] = []
        self._prepare = prepare
        self._ask = ask
        self._max_in_flight = max_in_flight
        self._drain_seconds = drain
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: Counter[Status] = Counter()
        self._fault: BaseException | None = None
        self._began: float | None = None
        self._elapsed: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning; stands still after the end."""
        if self._elapsed is not None:
            return self._elapsed
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began

    @property
    def in_flight(self) -> int:
        """Requests that wait for the end of their answer."""
        return len(self._tasks)

    def count(self, status: Status) -> int:
        """Requests that have ended like this."""
        return self._ended[status]

    async def run(self, stop: asyncio.Event) -> None:
        """Send all, and wait for the answers; once `stop` is set, send nothing more and wait for none."""
        self._began = asyncio.get_running_loop().time()
        stopping = asyncio.create_task(stop.wait())
        feeder = asyncio.create_task(self._feed())
        try:
            await asyncio.wait({feeder, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if feeder.done():
                feeder.result()
                await self._drain(stopping)
        finally:
            self._elapsed = self.elapsed
            left = [feeder, stopping, *self._tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    async def _feed(self) -> None:
        for planned in self.plan:
            content = self._prepare(planned)
            # Sleeping at least for a moment lets answers be read even when sending is behind.
            await asyncio.sleep(max(0.0, planned.at - self.elapsed))
            row = Row(planned.index, planned.at, planned.input_tokens, planned.output_tokens)
            self.rows.append(row)
            if self.in_flight >= self._max_in_flight:
                row.status = Status.REJECTED
                row.error = "max_in_flight"
                self._ended[row.status] += 1
                continue
            task = asyncio.create_task(self._send(content, row))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _send(self, content: bytes, row: Row) -> None:
        await self._ask(content, row, lambda: self.elapsed)
        self._ended[row.status] += 1

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        if not self._tasks:
            return
        answers = asyncio.ensure_future(asyncio.wait(set(self._tasks)))
        try:
            await asyncio.wait({answers, stopping}, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answers.cancel()
