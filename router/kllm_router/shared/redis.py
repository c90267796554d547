"""Tells the other routers of a service through Redis what this one does, and hears the same of them: see `told`.

Each router has a key of its own, which expires a second after it was last written, and its name in a sorted set of the
service. A round is one pipeline: write the own key if it is due, read the names, read the keys of those that are known.
No request ever waits for a round. When rounds fail, what was heard is forgotten after a second and each router goes on
with what it knows itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kllm_router.pauses import backoff
from kllm_router.shared.address import RedisAddress, read_address
from kllm_router.shared.exceptions import AddressError, ToldError
from kllm_router.shared.outbox import Outbox
from kllm_router.shared.peers import OnHome, Peers
from kllm_router.shared.told import MOST_BYTES, Told, decode

if TYPE_CHECKING:
    from pathlib import Path

    from kllm_router.metrics import SharedMetrics
    from kllm_router.scheduling.quota import Spent
    from kllm_router.scheduling.share import Share

_VERSION = 2
"""Of keys and of what is in them. Routers of different versions do not hear each other."""
_MOST_ROUTERS = 128
_NAME = re.compile(rb"[0-9a-f]{16}")
_MOST_PROBLEM = 200

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class RedisSettings:
    """How often and how patiently routers exchange.

    Attributes:
        interval_seconds: between two rounds.
        heartbeat_seconds: between two writes when nothing has changed.
        timeout_seconds: of one round.
        connect_seconds: of a round that has to connect first.
        forget_seconds: what is told counts for so long, in Redis and with those who heard it.
        gone_seconds: a name without a key for so long is removed.
        told_after_seconds: a problem that lasts so long is told to the operator.
        least_pause_seconds: after a first failure.
        most_pause_seconds: after many.
    """

    interval_seconds: float = 0.15
    heartbeat_seconds: float = 0.4
    timeout_seconds: float = 0.2
    connect_seconds: float = 1.0
    forget_seconds: float = 1.0
    gone_seconds: float = 10.0
    told_after_seconds: float = 5.0
    least_pause_seconds: float = 0.2
    most_pause_seconds: float = 3.0


class _RoundError(Exception):
    """A round failed; `reason` is one of a few words, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message[:_MOST_PROBLEM])
        self.reason = reason


class RedisShares:
    """Implements `kllm_router.interfaces.SharedLoad`. Belongs to one event loop.

    Args:
        source: where Redis is; a file is read before each connection.
        scope: what the routers that share have in common and no others.
        name: of this router: 16 hex characters that no other router has.
        metrics: told how it goes.
        on_home: told where the others' prompts went.
        clock: monotonic seconds; that of whoever asks `of`.
    """

    def __init__(
        self,
        source: RedisAddress | Path,
        *,
        scope: str,
        name: str,
        metrics: SharedMetrics,
        on_home: OnHome = lambda _id, _marks, _now: None,
        settings: RedisSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._name = name
        self._prefix = f"kllm:{_VERSION}:{scope}"
        self._names = f"{self._prefix}:routers"
        self._metrics = metrics
        self._settings = settings or RedisSettings()
        self._rng = rng or random.Random()  # noqa: S311  spreads reconnects, guards nothing
        self._clock = clock
        self._client: Redis | None = None
        self._address = ""
        self._peers = Peers(self._settings.forget_seconds, on_home)
        self._known: dict[str, float] = {}
        """Names of others, with when each last had a key."""
        self._refused_names: list[bytes] = []
        self._names_are_broken = False
        self._outbox = Outbox(self._settings.heartbeat_seconds)
        self._problem: str | None = "not connected yet"
        self._problem_since = clock()
        self._reason = ""

    def of(self, instance_id: str, now: float) -> Share:
        """See `SharedLoad`."""
        return self._peers.of(instance_id, now)

    def spent(self, key: str, now: float) -> Spent:
        """See `SharedLoad`."""
        return self._peers.spent(key, now)

    def status(self) -> dict[str, Any]:
        """See `SharedLoad`."""
        return {
            "up": self._problem is None,
            "address": self._address,
            "problem": self._problem or "",
            "routers": len(self._peers),
        }

    def unshared(self) -> str:
        """Why the others are not heard, once it has been so for some seconds; empty before."""
        lasted = self._clock() - self._problem_since
        return (self._problem or "") if lasted >= self._settings.told_after_seconds else ""

    async def run(self, own: Callable[[], Told]) -> None:
        """Exchange until cancelled; `own` gives what this router has to tell, whatever the sequence in it."""
        pauses, task = self._pauses(), asyncio.current_task()
        try:
            # The library can swallow a cancellation: asyncio.wait_for does on Python 3.11.
            while task is None or not task.cancelling():
                try:
                    await self._round(own())
                except _RoundError as error:
                    self._failed(error)
                    pause = next(pauses)
                else:
                    self._succeeded()
                    pauses, pause = self._pauses(), self._settings.interval_seconds
                self._metrics.routers.set(len(self._peers))
                await asyncio.sleep(pause)
        finally:
            await self._leave()

    # --- one round

    async def _round(self, own: Told) -> None:
        """Write and read once.

        Raises:
            _RoundError: Redis cannot be reached, or refused what is written.
        """
        started = self._clock()
        try:
            answers = await self._asked(own)
        except AddressError as error:
            raise _RoundError("address", str(error)) from error
        except (TimeoutError, RedisTimeoutError) as error:
            raise _RoundError("timeout", "no answer in time") from error
        # A server that is no Redis may be answered by any of these.
        except (RedisError, OSError, ValueError, IndexError) as error:
            raise _RoundError("connection", f"{type(error).__name__}: {error}") from error
        finally:
            self._peers.settle(self._clock())
        self._metrics.round_trip.observe(self._clock() - started)
        self._understand(answers)

    async def _asked(self, own: Told) -> dict[str, Any]:
        """Answers by command, those for the keys of others by their names."""
        settings = self._settings
        seconds = settings.connect_seconds if self._client is None else settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if self._client is None:
                    self._client = self._connected()
                pipeline = self._client.pipeline(transaction=False)
                asked = self._ask(pipeline, own)
                answers = await pipeline.execute(raise_on_error=False)
        except BaseException:
            # Its answers may still come, and would be taken for those of the next round.
            await self._disconnect()
            raise
        return dict(zip(asked, answers, strict=True))

    def _ask(self, pipeline: Any, own: Told) -> list[str]:
        """Fill a pipeline; the names of its commands in order."""
        settings, now, asked = self._settings, self._clock(), []
        if self._names_are_broken:
            pipeline.delete(self._names)
            asked.append("delete")
        if (value := self._outbox.due(own, now)) is not None:
            pipeline.set(self._key(self._name), value, px=round(settings.forget_seconds * 1000))
            pipeline.zadd(self._names, {self._name: 0})
            pipeline.pexpire(self._names, round(settings.gone_seconds * 1000))
            asked += ["set", "zadd", "pexpire"]
        gone: list[bytes | str] = [n for n, at in self._known.items() if now - at >= settings.gone_seconds]
        if gone or self._refused_names:
            pipeline.zrem(self._names, *gone, *self._refused_names)
            asked.append("zrem")
        pipeline.zrange(self._names, 0, _MOST_ROUTERS - 1)
        asked.append("zrange")
        for name in self._known:
            # One more than is read of a router, so that what is cut is not taken for whole.
            pipeline.getrange(self._key(name), 0, MOST_BYTES)
            asked.append(name)
        return asked

    def _understand(self, answers: dict[str, Any]) -> None:
        """Take over what the others told.

        Raises:
            _RoundError: Redis has answered and refused.
        """
        now = self._clock()
        for name in list(self._known):
            self._hear(name, answers.get(name), now)
        self._peers.settle(now)
        listed = answers["zrange"]
        self._names_are_broken = isinstance(listed, ResponseError) and "WRONGTYPE" in str(listed)
        if isinstance(listed, list):
            self._learn_names(listed, now)
        for answer in (answers.get("set"), answers.get("zadd"), listed):
            if isinstance(answer, Exception):
                self._outbox.forget()
                raise _RoundError("refused", f"{type(answer).__name__}: {answer}")

    def _hear(self, name: str, answer: Any, now: float) -> None:
        if not isinstance(answer, bytes):
            if isinstance(answer, Exception):
                self._metrics.failed("garbage")
            return
        if not answer:
            self._peers.forget(name)
            return
        self._known[name] = now
        try:
            self._peers.hear(name, decode(answer), now)
        except ToldError as error:
            self._metrics.failed("garbage")
            _log.debug("what another router told is not understood", router=name, reason=str(error))

    def _learn_names(self, listed: list[Any], now: float) -> None:
        names = [n for n in listed if isinstance(n, bytes) and _NAME.fullmatch(n)]
        self._refused_names = [n for n in listed if isinstance(n, bytes) and not _NAME.fullmatch(n)]
        others = {name.decode() for name in names} - {self._name}
        self._known = {name: self._known.get(name, now) for name in sorted(others)}

    # --- the connection

    def _connected(self) -> Redis:
        address = read_address(self._source)
        self._address = str(address)
        settings = self._settings
        return Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username or None,
            password=address.password or None,
            ssl=address.tls,
            # Rounds are timed as a whole, and with this, sending would swallow cancellations.
            socket_timeout=None,
            socket_connect_timeout=settings.connect_seconds,
            # The next round is the next try.
            retry=Retry(NoBackoff(), 0),
            max_connections=1,
            protocol=2,
        )

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._outbox.forget()
        if client is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._settings.timeout_seconds):
                    await client.aclose()

    async def _leave(self) -> None:
        """Take back what was told, so that the others need not wait until it expires."""
        if self._client is not None and self._problem is None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._settings.timeout_seconds):
                    pipeline = self._client.pipeline(transaction=False)
                    pipeline.delete(self._key(self._name))
                    pipeline.zrem(self._names, self._name)
                    await pipeline.execute(raise_on_error=False)
        await self._disconnect()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:router:{name}"

    def _pauses(self) -> Iterator[float]:
        settings = self._settings
        return backoff(self._rng, first_seconds=settings.least_pause_seconds, most_seconds=settings.most_pause_seconds)

    # --- what is said of it

    def _succeeded(self) -> None:
        if self._problem is not None:
            _log.info("load is shared with other routers", redis=self._address)
        self._problem, self._reason = None, ""
        self._metrics.up.set(1)

    def _failed(self, error: _RoundError) -> None:
        self._metrics.up.set(0)
        self._metrics.failed(error.reason)
        if error.reason != self._reason:
            _log.warning(
                "load is not shared with other routers", redis=self._address, reason=error.reason, error=str(error)
            )
        if self._problem is None:
            self._problem_since = self._clock()
        self._problem, self._reason = str(error), error.reason
