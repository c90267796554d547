"""Progress of a load: one live line on a terminal, a line every 5 s elsewhere, both on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING

from kllm.bars import bars
from kllm.bench.load import Load
from kllm.bench.row import Status

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_SECONDS = 5.0
_LIVE_SECONDS = 0.25


def line_of(load: Load) -> str:
    """Where a load is."""
    parts = [f"{load.elapsed:.0f} s", f"sent {len(load.rows) - load.count(Status.REJECTED)}/{len(load.plan)}"]
    parts += [f"in flight {load.in_flight}", f"ok {load.count(Status.OK)}"]
    parts += [f"{status} {load.count(status)}" for status in (Status.FAILED, Status.REJECTED) if load.count(status)]
    return "  ".join(parts)


@contextlib.asynccontextmanager
async def progress(load: Load, *, line_seconds: float = _LINE_SECONDS) -> AsyncIterator[None]:
    """Tell how far a load is."""
    if sys.stderr.isatty():
        with bars() as bar:
            async with _beating(_live(load, bar)):
                yield
    else:
        async with _beating(_lines(load, line_seconds)):
            yield


@contextlib.asynccontextmanager
async def _beating(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    beat = asyncio.create_task(work)
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.wait({beat})


async def _lines(load: Load, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        print(line_of(load), file=sys.stderr, flush=True)


async def _live(load: Load, bar: Progress) -> None:
    task = bar.add_task("", total=max(1, len(load.plan)))
    while True:
        bar.update(task, completed=len(load.rows), description=line_of(load), refresh=True)
        await asyncio.sleep(_LIVE_SECONDS)
