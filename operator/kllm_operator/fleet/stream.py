"""Reading of a stream of reports that come at an interval."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

_LEAST_SECONDS = 3.0
"""A busy machine may hold reports back for a moment."""


async def reports(call: Any, *, interval_seconds: float) -> AsyncIterator[Any]:
    """Reports of a gRPC stream until its end.

    Args:
        call: the stream.
        interval_seconds: between two reports.

    Raises:
        TimeoutError: three of them are missing.
        grpc.aio.AioRpcError: the stream broke.
    """
    silence = max(_LEAST_SECONDS, 3 * interval_seconds + 0.5)
    while True:
        async with asyncio.timeout(silence):
            report = await call.read()
        if report is grpc.aio.EOF:
            return
        yield report
