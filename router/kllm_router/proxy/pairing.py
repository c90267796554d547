"""Runs requests on pairs of engines, and frees engines of requests that nobody waits for.

`Pairing.open` gives an `Exchange`. Entering it runs the request up to the first byte of its answer; leaving it, for
whatever reason, frees both engines of all that did not finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from kllm_router.exceptions import UpstreamError
from kllm_router.proxy.attempt import Attempt
from kllm_router.proxy.exchange import Exchange
from kllm_router.proxy.recovery import Recovery
from kllm_router.proxy.waiting_room import WaitingRoom
from kllm_router.scheduling.budget import RetryBudget

if TYPE_CHECKING:
    from kllm_router.interfaces import Endpoint, EngineRequest, FleetView, RequestSummary
    from kllm_router.metrics import RouterMetrics
    from kllm_router.proxy.progress import Progress
    from kllm_router.proxy.relay import Relay
    from kllm_router.proxy.sides import PrefillSide
    from kllm_router.proxy.upstream import EngineClient
    from kllm_router.settings import Settings

_log = structlog.get_logger(__name__)


class Pairing:
    """Knows nothing of the client's protocol.

    Attributes:
        listeners: told how each request ended.
        room: where new requests wait while no instance serves.
    """

    def __init__(self, fleet: FleetView, client: EngineClient, settings: Settings, metrics: RouterMetrics) -> None:
        self.settings = settings
        self.listeners: list[Callable[[RequestSummary], None]] = [metrics.request_ended]
        self.room = WaitingRoom(settings.wait)
        self._fleet = fleet
        self._client = client
        self._metrics = metrics
        self._budget = RetryBudget(settings.recovery.budget)
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    @property
    def takes_requests(self) -> bool:
        """Whether a request that comes now is served, or may wait until it is."""
        return self._fleet.ready or (self._fleet.known and self.room.open)

    def open(
        self,
        request: EngineRequest,
        *,
        arrived: float | None = None,
        timing: bool = False,
        deadline_seconds: float | None = None,
    ) -> Exchange:
        """Begin a request.

        Args:
            request: what to run.
            arrived: when the client's request arrived, on the monotonic clock; now, if left out.
            timing: add an SSE comment with the stage times before the end of a stream.
            deadline_seconds: how long the client will wait, from its arrival; the router's own limit holds too.
        """
        now = time.monotonic()
        self._budget.arrived(now)
        self._open += 1
        return Exchange(
            self,
            request,
            arrived=now if arrived is None else arrived,
            timing=timing,
            deadline_seconds=deadline_seconds,
        )

    async def close(self) -> None:
        """Abort what prefill instances still hold, and wait for all aborts; each has its own timeout."""
        self._closing.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- for exchanges

    def recovery(self) -> Recovery:
        """What a new request may do about failures."""
        return Recovery(
            self._fleet,
            settings=self.settings.recovery,
            spend=self._spend,
            metrics=self._metrics,
            room=self.room,
        )

    def attempt(self, request: EngineRequest, progress: Progress, *, new_relay: Callable[[], Relay]) -> Attempt:
        """One try of a request."""
        return Attempt(request, progress, fleet=self._fleet, client=self._client, new_relay=new_relay, free=self.abort)

    def abort(self, endpoint: Endpoint, rid: str) -> None:
        """Free `rid` on an engine, without waiting for it."""
        self._spawn(self._abort(endpoint, rid))

    def release(self, side: PrefillSide, rid: str) -> None:
        """Let P finish its own answer, which comes after the transfer; abort what takes too long."""
        if not side.outcome.done():
            self._spawn(self._release(side, rid))

    def ended(self, summary: RequestSummary) -> None:
        """A request has ended, however it did."""
        self._open -= 1
        if summary.attempts > 1:
            _log.info(
                "more than one attempt",
                rid=summary.rid,
                status=summary.status,
                attempts=summary.attempts,
                continuations=summary.continuations,
                prefill=summary.prefill_instance,
                decode=summary.decode_instance,
            )
        for listener in self.listeners:
            listener(summary)

    # --- inside

    def _spend(self) -> bool:
        return self._budget.spend(time.monotonic(), in_flight=self._open)

    def _spawn(self, coroutine: asyncio._CoroutineLike[None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort(self, endpoint: Endpoint, rid: str) -> None:
        try:
            response = await self._client.request(
                endpoint, "/abort_request", orjson.dumps({"rid": rid}), timeout_seconds=self.settings.timeouts.abort
            )
        except (UpstreamError, TimeoutError) as error:
            self._metrics.aborted(endpoint.role, "failed")
            _log.warning("abort failed", rid=rid, instance=endpoint.instance_id, error=str(error) or "timeout")
            return
        self._metrics.aborted(endpoint.role, "accepted" if response.status == 200 else "refused")

    async def _release(self, side: PrefillSide, rid: str) -> None:
        closing = asyncio.ensure_future(self._closing.wait())
        waiting: set[asyncio.Future[Any]] = {side.outcome, closing}
        await asyncio.wait(
            waiting,
            timeout=self.settings.timeouts.release,
            return_when=asyncio.FIRST_COMPLETED,
        )
        closing.cancel()
        if not side.outcome.done():
            side.close()
            await self._abort(side.endpoint, rid)
