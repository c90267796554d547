"""Follows the engine's KV events over ZMQ and closes gaps through its replay socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from kllm_engine.agent.cache.book import CacheBook
from kllm_engine.agent.cache.events import KvEvent, decode_batch
from kllm_engine.agent.cache.mirror import UnknownParentError

_RECONNECT_MILLISECONDS = 100
_RECEIVE_LIMIT = 100_000
_REPLAY_TIMEOUT_SECONDS = 10.0
_PROBE_SECONDS = 10.0
_FIRST_PROBE_SECONDS = 0.5
_REBUILD_SECONDS = 30.0
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = structlog.get_logger(__name__)

Batch = tuple[int, bytes]


class CacheFollower:
    """Keeps a `CacheBook` in step with one engine.

    Args:
        book: what is kept.
        endpoint: the engine's PUB socket; it need not exist yet.
        replay_endpoint: its ROUTER socket, which repeats the last batches.
        clock: seconds, monotonic.
        probe_seconds: after so long without an event, ask whether the last ones were lost.
    """

    def __init__(
        self,
        book: CacheBook,
        *,
        endpoint: str,
        replay_endpoint: str,
        clock: Callable[[], float] = time.monotonic,
        probe_seconds: float = _PROBE_SECONDS,
    ) -> None:
        self._book = book
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._clock = clock
        self._probe_seconds = probe_seconds
        self._context = zmq.asyncio.Context()
        self._expected = 0
        self._rebuilt_at = -_REBUILD_SECONDS
        self._broken = False
        self.gaps = 0

    async def run(self) -> None:
        """Follow until cancelled. To be called once the engine is ready to serve."""
        subscriber = self._context.socket(SocketType.SUB)
        subscriber.setsockopt(SocketOption.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
        subscriber.setsockopt(SocketOption.LINGER, 0)
        subscriber.set_hwm(_RECEIVE_LIMIT)
        subscriber.subscribe(b"")
        subscriber.connect(self._endpoint)
        try:
            # A subscription takes effect some time after connect: what was published until then comes by replay.
            await self._catch_up()
            patience = min(_FIRST_PROBE_SECONDS, self._probe_seconds)
            while True:
                if await subscriber.poll(int(patience * 1000)):
                    _, sequence, payload = await subscriber.recv_multipart()
                    await self._receive(int.from_bytes(sequence, "big"), payload)
                else:
                    await self._catch_up()
                patience = self._probe_seconds
        finally:
            subscriber.close(0)
            self._context.term()

    async def _receive(self, sequence: int, payload: bytes) -> None:
        if sequence < self._expected:
            return  # A replay has brought it already.
        if sequence > self._expected:
            self.gaps += 1
            _log.warning("KV events were lost", expected=self._expected, received=sequence)
            if not await self._catch_up():
                self._broken = True
        if sequence >= self._expected:
            await self._apply(sequence, payload)

    async def _catch_up(self) -> bool:
        """Bring what was missed, or start the mirror again if the engine no longer has all of it."""
        if self._broken:
            await self._rebuild()
            return not self._broken
        batches = await self._replay(self._expected)
        if batches is None:
            return False
        if batches and batches[0][0] > self._expected:
            self._broken = True
            await self._rebuild()
            return not self._broken
        for sequence, payload in batches:
            if sequence >= self._expected:
                await self._apply(sequence, payload)
        return True

    async def _apply(self, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        for event in _decode(sequence, payload):
            try:
                self._book.apply(event)
            except (UnknownParentError, ValueError) as error:
                self._book.skipped_events += 1
                _log.debug("KV event does not fit the mirror", sequence=sequence, reason=str(error))
                self._broken = True
        if self._broken:
            await self._rebuild()

    async def _rebuild(self) -> None:
        """Start the mirror again from all that the engine still has; not too often, for it may change nothing."""
        if self._clock() - self._rebuilt_at < _REBUILD_SECONDS:
            return
        self._rebuilt_at = self._clock()
        batches = await self._replay(0)
        if batches is None:
            return
        if batches:
            self._expected = max(self._expected, batches[-1][0] + 1)
        self._book.rebuild(event for sequence, payload in batches for event in _decode(sequence, payload))
        self._broken = False

    async def _replay(self, first: int) -> list[Batch] | None:
        """Batches from `first` on that the engine still has; None when it did not answer in time."""
        dealer = self._context.socket(SocketType.DEALER)
        dealer.setsockopt(SocketOption.LINGER, 0)
        dealer.set_hwm(_RECEIVE_LIMIT)
        dealer.connect(self._replay_endpoint)
        batches: list[Batch] = []
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT_SECONDS):
                await dealer.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    _, sequence, payload = await dealer.recv_multipart()
                    if sequence == _END_OF_REPLAY:
                        return batches
                    batches.append((int.from_bytes(sequence, "big"), payload))
        except TimeoutError:
            _log.warning("no replay of KV events", first=first, timeout_seconds=_REPLAY_TIMEOUT_SECONDS)
            return None
        finally:
            dealer.close(0)


def _decode(sequence: int, payload: bytes) -> list[KvEvent]:
    try:
        return decode_batch(payload)
    except msgspec.DecodeError as error:
        _log.warning("KV events cannot be read", sequence=sequence, reason=str(error))
        return []
