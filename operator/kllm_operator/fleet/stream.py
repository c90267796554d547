"""Streams of reports that come at an interval, the connections that they come through, and the sessions on those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

_LEAST_SECONDS = 8.0
"""A busy machine may hold reports back for a moment, and the readers' own more than any: whoever is late with thousands
of streams must not open all of them again. Below the age at which loads count as unknown."""
_FIRST_SECONDS = 30.0
"""For the first report: a process that calls thousands at once takes longer to open all streams than to read them, and
whoever gives up and calls again only makes that worse."""
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Whoever is not there yet is there soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 300),
    # How long a connection is tried for.
    ("grpc.min_reconnect_backoff_ms", 3000),
    # A line that carries a small report each second is not worth measuring: a ping and its answer for each report.
    ("grpc.http2.bdp_probe", 0),
)


_FAULT_SECONDS = 1.0
_MOST_FAULT_SECONDS = 60.0
"""A fault is one of this program, which comes again with the next report that is like the last: each is logged."""

_log = structlog.get_logger(__name__)


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


async def sessions(
    address: str,
    session: Callable[[grpc.aio.Channel], Awaitable[None]],
    *,
    lost: Callable[[grpc.aio.AioRpcError | TimeoutError], None],
    pause_seconds: float,
) -> None:
    """Hold one session after the other until cancelled. No error ends that, for nobody would notice the silence.

    Args:
        address: host:port.
        session: one of them, to its end.
        lost: hears how one ended that the other side, or the way to it, has ended; must not wait.
        pause_seconds: between two of them. After what else a session may raise it is longer each time.
    """
    line, faults = Line(address), 0
    try:
        while True:
            pause, faults = pause_seconds, faults + 1
            try:
                await _held(line, session, lost)
                faults = 0
            except Exception:  # noqa: BLE001  a fault in reading one report must not end the reading of all others
                pause = min(_FAULT_SECONDS * 2.0 ** (faults - 1), _MOST_FAULT_SECONDS)
                _log.exception("StreamFaulty", address=address, again_seconds=pause)
            await asyncio.sleep(pause)
    finally:
        await line.close()


async def _held(
    line: Line,
    session: Callable[[grpc.aio.Channel], Awaitable[None]],
    lost: Callable[[grpc.aio.AioRpcError | TimeoutError], None],
) -> None:
    try:
        await session(line.channel)
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        if isinstance(error, TimeoutError):
            await line.was_silent()
        lost(error)


async def reports(call: Any, *, interval_seconds: float) -> AsyncIterator[Any]:
    """Reports of a gRPC stream until its end, or until nobody takes them any more: the stream is ended then.

    Args:
        call: the stream.
        interval_seconds: between two reports.

    Raises:
        TimeoutError: three of them are missing, or the first one for long.
        grpc.aio.AioRpcError: the stream broke.
    """
    silence = max(_LEAST_SECONDS, 3 * interval_seconds + 0.5)
    patience = max(_FIRST_SECONDS, silence)
    try:
        while True:
            async with asyncio.timeout(patience):
                report = await call.read()
            if report is grpc.aio.EOF:
                return
            yield report
            patience = silence
    finally:
        # A stream that is only left waits on for the connection: once that stands, all that were ever opened report.
        call.cancel()
