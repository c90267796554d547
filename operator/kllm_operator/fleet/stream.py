"""Streams of reports that come at an interval, and the connections that they come through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

_LEAST_SECONDS = 8.0
"""A busy machine may hold reports back for a moment, and the readers' own more than any: whoever is late with thousands
of streams must not open all of them again. Below the age at which loads count as unknown."""
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Whoever is not there yet is there soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 300),
    # How long a connection is tried for.
    ("grpc.min_reconnect_backoff_ms", 3000),
)


class Line:
    """One connection to one address at a time, over many sessions.

    A channel that is closed while it connects keeps its socket until it has connected or given up: with a channel for
    each session, those to thousands of agents that answer late would pile up.

    Args:
        address: host:port.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """For the next session; it connects again by itself."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        return self._channel

    async def was_silent(self) -> None:
        """Give a connection up that stands and carries nothing; one that is being made is waited for."""
        if self.channel.get_state() is grpc.ChannelConnectivity.READY:
            await self.close()

    async def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


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
