"""All that is known of the fleet: records, caches and watches, kept by the streams of the agents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import InstanceState
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import Endpoint, EventKind, WatchedEvent
from kllm_router.proxy.agent_client import AgentClient, AgentListener
from kllm_router.proxy.record import Record, new_record
from kllm_router.proxy.watches import Watch, Watches
from kllm_router.scheduling.prefix import PrefixIndex, Tier

_KINDS = {
    engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE: EventKind.PREFILL_DONE,
    engine_pb2.REQUEST_EVENT_KIND_REQUEUED: EventKind.REQUEUED,
    engine_pb2.REQUEST_EVENT_KIND_RELEASED: EventKind.RELEASED,
    engine_pb2.REQUEST_EVENT_KIND_FAILED: EventKind.FAILED,
}
_TIERS = {
    engine_pb2.CACHE_TIER_DEVICE: Tier.DEVICE,
    engine_pb2.CACHE_TIER_HOST: Tier.HOST,
    engine_pb2.CACHE_TIER_DISK: Tier.DISK,
    engine_pb2.CACHE_TIER_SHARED: Tier.SHARED,
}

_log = structlog.get_logger(__name__)


class Follower(Protocol):
    """Follows one agent until its task is cancelled."""

    async def run(self) -> None:
        """Follow the agent for ever."""


Follow = Callable[[DiscoveredInstance, AgentListener], Follower]
"""Makes the follower of one agent."""


class FleetBook:
    """Implements `AgentListener`. Belongs to one event loop.

    Attributes:
        records: by instance id.
        ordered: the same, in the order of their ids.
        index: blocks of their caches.
        discovered_at: when discovery first told of the instances, in seconds of `clock`; None before.

    Args:
        follow: makes the follower of an agent.
        lost_seconds: after an agent's streams broke, its requests are given up unless it is back by then.
        silent_seconds: an engine that gave no sign of life for so long counts as lost, although its agent lives.
        clock: monotonic seconds.
        on_new: told of every instance that is another process now, or gone.
        on_milestone: told of every milestone of a request.
    """

    def __init__(
        self,
        *,
        follow: Follow,
        lost_seconds: float,
        silent_seconds: float,
        clock: Callable[[], float],
        on_new: Callable[[str], None],
        on_milestone: Callable[[str, WatchedEvent], None] = lambda _rid, _event: None,
    ) -> None:
        self.records: dict[str, Record] = {}
        self.ordered: list[Record] = []
        self.index = PrefixIndex()
        self.discovered_at: float | None = None
        self._follow = follow
        self._lost_seconds = lost_seconds
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._on_new = on_new
        self._on_milestone = on_milestone
        self._watches = Watches()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._losses: dict[str, asyncio.TimerHandle] = {}
        self._requests: dict[str, int] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    # --- requests of this router

    @property
    def in_flight(self) -> int:
        """Requests that are on at least one instance."""
        return len(self._requests)

    def watch(self, rid: str, endpoint: Endpoint) -> AbstractContextManager[Watch]:
        """Watch a request; on an instance that is gone already, the first event says so."""
        record = self.records.get(endpoint.instance_id)
        here = record is not None and record.instance.incarnation == endpoint.incarnation
        return self._watches.open(
            rid, endpoint.instance_id, endpoint.incarnation, lost="" if here else "it has left the fleet"
        )

    def enter(self, rid: str, endpoint: Endpoint, tokens: int) -> None:
        """A request goes to an instance, with so many tokens of work."""
        record = self.records.get(endpoint.instance_id)
        if record is None:
            return
        self.leave(rid, endpoint)
        record.send(rid, tokens, self._clock())
        self._requests[rid] = self._requests.get(rid, 0) + 1

    def leave(self, rid: str, endpoint: Endpoint) -> None:
        """A request has left an instance; one that was not there changes nothing."""
        record = self.records.get(endpoint.instance_id)
        if record is not None and record.finish(rid):
            self._left(rid)

    async def changed(self) -> None:
        """Wait until an instance may have begun to take requests."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    # --- discovery

    async def run(self, discovered: AsyncIterator[list[DiscoveredInstance]]) -> None:
        """Follow discovery until it ends or this is cancelled."""
        try:
            async for instances in discovered:
                self.apply(instances)
        finally:
            await self.close()

    def apply(self, instances: list[DiscoveredInstance]) -> None:
        """Follow the agents of these instances, and no others."""
        if self.discovered_at is None:
            self.discovered_at = self._clock()
        wanted = {instance.id: instance for instance in instances}
        for instance_id, record in list(self.records.items()):
            known = wanted.get(instance_id)
            if known is None or known.agent != record.agent:
                self._forget(instance_id)
        for instance in instances:
            if instance.id not in self.records:
                self.records[instance.id] = new_record(instance.id, instance.role, instance.agent)
                task = asyncio.get_running_loop().create_task(self._follow(instance, self).run(), name=instance.id)
                task.add_done_callback(_check_follower)
                self._tasks[instance.id] = task
        self.ordered = sorted(self.records.values(), key=lambda record: record.id)

    async def close(self) -> None:
        """Stop following all agents."""
        tasks = list(self._tasks.values())
        for instance_id in list(self.records):
            self._forget(instance_id)
        self.ordered = []
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- AgentListener

    def on_facts(self, instance_id: str, facts: engine_pb2.Instance) -> None:
        """See `AgentListener`."""
        record = self._heard(instance_id)
        if record is None:
            return
        if record.learn_facts(facts):
            self.index.begin(instance_id, facts.incarnation)
            self._watches.lose(instance_id, "Restarted", "its engine was restarted", keep_incarnation=facts.incarnation)
            self._on_new(instance_id)
        record.lost = False
        if record.instance.state is InstanceState.FAILED:
            self._watches.lose(instance_id, "Failed", record.message or "its engine failed")
        timer = self._losses.pop(instance_id, None)
        if timer is not None:
            timer.cancel()
        self._wake()

    def on_not_started(self, instance_id: str, message: str) -> None:
        """See `AgentListener`."""
        record = self._heard(instance_id)
        if record is not None:
            record.learn_state(InstanceState.STARTING, message)

    def on_load(self, instance_id: str, report: engine_pb2.LoadReport) -> None:
        """See `AgentListener`."""
        record = self._heard(instance_id)
        if record is None or report.incarnation != record.instance.incarnation:
            return
        before = record.instance.takes_requests and not record.silent
        record.learn_load(report, self._clock())
        age = report.age_seconds
        record.silent = age > self._silent_seconds
        if record.instance.state is InstanceState.FAILED:
            said = record.message or "its engine failed"
            self._watches.lose(instance_id, "Failed", said, unheard_seconds=age)
        elif record.silent:
            said = f"no sign of life for {age:.1f} seconds"
            self._watches.lose(instance_id, "Silent", said, unheard_seconds=age)
        elif record.instance.takes_requests and not before:
            self._wake()

    def on_request(self, instance_id: str, event: engine_pb2.RequestEvent) -> None:
        """See `AgentListener`."""
        record = self._heard(instance_id)
        kind = _KINDS.get(event.kind)
        if record is None or kind is None:
            return
        record.settle(event.request_id)
        told = WatchedEvent(
            kind,
            instance_id=instance_id,
            queue_seconds=event.queue_seconds,
            prefill_seconds=event.prefill_seconds,
            parked_seconds=event.parked_seconds,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            reason=event.reason,
            message=event.message,
        )
        self._on_milestone(event.request_id, told)
        self._watches.dispatch(event.request_id, event.incarnation, told)

    def on_cache(self, instance_id: str, update: engine_pb2.CacheUpdate) -> None:
        """See `AgentListener`."""
        if self._heard(instance_id) is None:
            return
        incarnation, change = update.incarnation, update.WhichOneof("change")
        self.index.begin(instance_id, incarnation)
        if change == "stored":
            self.index.store(instance_id, incarnation, _tier(update.stored.tier), update.stored.blocks)
        elif change == "removed":
            self.index.remove(instance_id, incarnation, _tier(update.removed.tier), update.removed.blocks)
        elif change == "cleared":
            self.index.clear(instance_id, incarnation)
        elif change == "snapshot":
            if update.snapshot.first:
                self.index.clear(instance_id, incarnation)
            self.index.store(instance_id, incarnation, _tier(update.snapshot.tier), update.snapshot.blocks)

    def on_disconnected(self, instance_id: str, reason: str, *, refused: bool) -> None:
        """See `AgentListener`."""
        record = self.records.get(instance_id)
        if record is None:
            return
        if record.problem != reason:
            _log.warning("agent lost", instance=instance_id, agent=record.agent, reason=reason, refused=refused)
        record.connected, record.problem = False, reason
        record.forget_load()
        if refused:
            # Its process is gone or unreachable, which is what a silence would only suggest.
            unheard = self._unheard(record)
            record.heard_at = None
            self._lose(instance_id, reason, unheard)
        elif instance_id not in self._losses:
            loop = asyncio.get_running_loop()
            self._losses[instance_id] = loop.call_later(self._lost_seconds, self._lose, instance_id, reason)

    # --- inside

    def _heard(self, instance_id: str) -> Record | None:
        record = self.records.get(instance_id)
        if record is not None:
            record.heard_at, record.connected, record.problem = self._clock(), True, ""
        return record

    def _left(self, rid: str) -> None:
        left = self._requests.get(rid, 0) - 1
        if left > 0:
            self._requests[rid] = left
        else:
            self._requests.pop(rid, None)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _unheard(self, record: Record | None) -> float:
        """Seconds since the last word of an instance's agent."""
        return 0.0 if record is None or record.heard_at is None else self._clock() - record.heard_at

    def _lose(self, instance_id: str, reason: str, unheard_seconds: float | None = None) -> None:
        timer = self._losses.pop(instance_id, None)
        if timer is not None:
            timer.cancel()
        record = self.records.get(instance_id)
        if record is not None:
            record.lost = True
        unheard = self._unheard(record) if unheard_seconds is None else unheard_seconds
        self._watches.lose(instance_id, "AgentLost", reason, unheard_seconds=unheard)

    def _forget(self, instance_id: str) -> None:
        record = self.records.pop(instance_id)
        for rid in record.requests():
            self._left(rid)
        self.index.forget(instance_id)
        self._on_new(instance_id)
        task = self._tasks.pop(instance_id, None)
        if task is not None:
            task.cancel()
        self._lose(instance_id, "it has left the fleet")


def agent_follower(token: str, rng: random.Random) -> Follow:
    """Followers that talk to agents over gRPC."""

    def follow(instance: DiscoveredInstance, listener: AgentListener) -> Follower:
        return AgentClient(instance.id, instance.agent, token=token, listener=listener, rng=rng)

    return follow


def _check_follower(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("an agent is no longer followed", instance=task.get_name(), exc_info=error)


def _tier(tier: engine_pb2.CacheTier) -> Tier:
    return _TIERS.get(tier, Tier.DEVICE)
