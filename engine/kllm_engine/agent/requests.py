"""Milestones of single requests: who is parked now, and a live stream for each subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_engine.messages import Request

QUEUE_LIMIT = 8192
"""Events that one subscriber may lag behind before its stream ends."""

_WAITING_LIMIT = 65_536

_KINDS = {
    "prefill_done": engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE,
    "requeued": engine_pb2.REQUEST_EVENT_KIND_REQUEUED,
    "released": engine_pb2.REQUEST_EVENT_KIND_RELEASED,
    "failed": engine_pb2.REQUEST_EVENT_KIND_FAILED,
}

_log = structlog.get_logger(__name__)


class SlowSubscriberError(Exception):
    """A subscriber lagged behind by more than the limit and has lost events."""


class Subscription:
    """Events for one subscriber, oldest first; those that wait for a decode instance come before new ones."""

    def __init__(self, waiting: list[engine_pb2.RequestEvent], limit: int) -> None:
        self._waiting = waiting[::-1]
        self._queue: asyncio.Queue[engine_pb2.RequestEvent] = asyncio.Queue(limit)
        self._lost = asyncio.Event()

    def put(self, event: engine_pb2.RequestEvent) -> None:
        """Add an event; one too many ends the subscription."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._lost.set()

    async def next(self) -> engine_pb2.RequestEvent:
        """The next event.

        Raises:
            SlowSubscriberError: events were lost.
        """
        if self._lost.is_set():
            raise SlowSubscriberError(f"more than {self._queue.maxsize} request events were waiting")
        return self._waiting.pop() if self._waiting else await self._queue.get()


class RequestBook:
    """Requests that wait for a decode instance, and the subscribers.

    Args:
        queue_limit: events that one subscriber may lag behind.
    """

    def __init__(self, *, queue_limit: int = QUEUE_LIMIT) -> None:
        self._queue_limit = queue_limit
        self._waiting: dict[str, engine_pb2.RequestEvent] = {}
        self._subscriptions: set[Subscription] = set()

    def update(self, request: Request, incarnation: int) -> None:
        """Take a milestone and tell all subscribers."""
        event = engine_pb2.RequestEvent(
            request_id=request.rid,
            kind=_KINDS[request.kind],
            incarnation=incarnation,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            queue_seconds=request.queue_seconds,
            prefill_seconds=request.prefill_seconds,
            parked_seconds=request.parked_seconds,
            reason=request.reason,
            message=request.message,
        )
        self._waiting.pop(request.rid, None)
        # Both kinds ask for a decode instance, so a subscriber that comes back must hear of them.
        if request.kind in {"prefill_done", "requeued"} and not request.bound:
            self._waiting[request.rid] = event
            if len(self._waiting) > _WAITING_LIMIT:
                forgotten = next(iter(self._waiting))
                del self._waiting[forgotten]
                _log.warning("too many parked requests to remember", forgotten=forgotten, limit=_WAITING_LIMIT)
        for subscription in self._subscriptions:
            subscription.put(event)

    def clear(self) -> None:
        """No request is here: the engine has begun a new incarnation."""
        self._waiting.clear()

    def waiting(self) -> list[engine_pb2.RequestEvent]:
        """Last events of the requests that wait for a decode instance, oldest first."""
        return list(self._waiting.values())

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Receive events until the context ends."""
        subscription = Subscription(self.waiting(), self._queue_limit)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
