"""Who waits for the milestones of which request."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from kllm_router.interfaces import EventKind, WatchedEvent

_MAX_UNREAD = 64
"""A request has a handful of milestones; more unread ones come from an agent that repeats itself."""


class Watch:
    """Implements `kllm_router.interfaces.RequestWatch` for one request on one incarnation of one instance."""

    def __init__(self, rid: str, instance_id: str, incarnation: int) -> None:
        self.rid = rid
        self.instance_id = instance_id
        self.incarnation = incarnation
        self._events: deque[WatchedEvent] = deque(maxlen=_MAX_UNREAD)
        self._arrived = asyncio.Event()

    async def next(self) -> WatchedEvent:
        """Wait for the next event. Cancelling the call loses no event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def put(self, event: WatchedEvent) -> None:
        """Tell the one who waits."""
        self._events.append(event)
        self._arrived.set()


class Watches:
    """All open watches. Events of requests that nobody here watches belong to other routers."""

    def __init__(self) -> None:
        self._by_request: dict[tuple[str, str], Watch] = {}
        self._by_instance: defaultdict[str, set[Watch]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._by_request)

    @contextmanager
    def open(self, rid: str, instance_id: str, incarnation: int, *, lost: str = "") -> Iterator[Watch]:
        """Watch a request while the context is open; `lost` says why the instance is gone already."""
        watch = Watch(rid, instance_id, incarnation)
        if lost:
            watch.put(_lost(instance_id, "Gone", lost))
        key = (rid, instance_id)
        self._by_request[key] = watch
        self._by_instance[instance_id].add(watch)
        try:
            yield watch
        finally:
            if self._by_request.get(key) is watch:
                del self._by_request[key]
            self._by_instance[instance_id].discard(watch)
            if not self._by_instance[instance_id]:
                del self._by_instance[instance_id]

    def dispatch(self, rid: str, incarnation: int, event: WatchedEvent) -> bool:
        """Tell the watch of a request, if there is one; say whether there was."""
        watch = self._by_request.get((rid, event.instance_id))
        if watch is None or watch.incarnation != incarnation:
            return False
        watch.put(event)
        return True

    def lose(
        self,
        instance_id: str,
        reason: str,
        message: str,
        *,
        unheard_seconds: float = 0.0,
        keep_incarnation: int | None = None,
    ) -> None:
        """Tell all watches of an instance that it is gone, except those of `keep_incarnation`."""
        event = _lost(instance_id, reason, message, unheard_seconds)
        for watch in list(self._by_instance.get(instance_id, ())):
            if watch.incarnation != keep_incarnation:
                watch.put(event)


def _lost(instance_id: str, reason: str, message: str, unheard_seconds: float = 0.0) -> WatchedEvent:
    return WatchedEvent(
        EventKind.INSTANCE_LOST,
        instance_id=instance_id,
        reason=reason,
        message=message,
        unheard_seconds=unheard_seconds,
    )
