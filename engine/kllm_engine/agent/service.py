"""The contract `kllm.engine.v1.EngineAgent`, served from what the agent's books hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.fleet import InstanceState
from kllm_engine.agent.cache.book import CacheBook, SnapshotPart, Update
from kllm_engine.agent.cache.changes import Removed, Stored, Tier
from kllm_engine.agent.changes import wait_set
from kllm_engine.agent.drain import DrainWatch
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import LoadBook, delta
from kllm_engine.agent.requests import RequestBook, SlowSubscriberError

SERVICE_NAME = "kllm.engine.v1.EngineAgent"

_SHORTEST_INTERVAL = 0.02
_LONGEST_INTERVAL = 60.0
_DEFAULT_INTERVAL = 1.0
_EARLY_SHARE = 0.1
"""A change is told at once if this share of the interval has passed since the last report."""

_IDLE_WAKE_SECONDS = 60.0
_TIERS = {
    Tier.DEVICE: engine_pb2.CACHE_TIER_DEVICE,
    Tier.HOST: engine_pb2.CACHE_TIER_HOST,
    Tier.DISK: engine_pb2.CACHE_TIER_DISK,
    Tier.SHARED: engine_pb2.CACHE_TIER_SHARED,
}

Context = grpc.aio.ServicerContext[Any, Any]


class EngineAgentService(engine_pb2_grpc.EngineAgentServicer):
    """Answers routers and the operator.

    Args:
        instance: state and facts.
        loads: newest load.
        requests: parked requests and milestones.
        cache: what the KV cache holds.
        drain: begins a drain and follows it.
    """

    def __init__(
        self, *, instance: Instance, loads: LoadBook, requests: RequestBook, cache: CacheBook, drain: DrainWatch
    ) -> None:
        self._instance = instance
        self._loads = loads
        self._requests = requests
        self._cache = cache
        self._drain = drain

    async def GetInstance(  # noqa: N802 - named by the contract
        self, _request: engine_pb2.GetInstanceRequest, context: Context
    ) -> engine_pb2.Instance:
        """Facts of this incarnation."""
        return await self._described(context)

    async def WatchLoad(  # noqa: N802 - named by the contract
        self, request: engine_pb2.WatchLoadRequest, _context: Context
    ) -> AsyncIterator[engine_pb2.LoadReport]:
        """A report at once, then one each interval and soon after a change of state or of parked requests."""
        interval = _interval_seconds(request.interval_milliseconds)
        gap = max(_SHORTEST_INTERVAL, interval * _EARLY_SHARE)
        sequence = 0
        before: engine_pb2.LoadReport | None = None
        with self._instance.changes.subscribe() as changed:
            while True:
                changed.clear()
                sequence += 1
                now = self._loads.report(sequence)
                yield delta(before, now) if request.deltas and before is not None else now
                before = now
                sent = time.monotonic()
                if await wait_set(changed, interval):
                    await asyncio.sleep(sent + gap - time.monotonic())

    async def WatchRequests(  # noqa: N802 - named by the contract
        self, _request: engine_pb2.WatchRequestsRequest, context: Context
    ) -> AsyncIterator[engine_pb2.RequestEvent]:
        """Requests that wait for a decode instance first, then milestones as they come."""
        with self._requests.subscribe() as subscription:
            # A subscriber that has these knows that it will miss nothing from now on.
            await context.send_initial_metadata(())
            while True:
                try:
                    event = await subscription.next()
                except SlowSubscriberError as error:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}; subscribe again")
                yield event

    async def WatchCache(  # noqa: N802 - named by the contract
        self, request: engine_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[engine_pb2.CacheUpdate]:
        """A snapshot, unless the log still reaches back to `from_sequence`, then changes as they come."""
        await self._described(context)
        incarnation = self._instance.incarnation
        following = request.from_sequence if request.incarnation == incarnation else 0
        with self._cache.changes.subscribe() as changed:
            while True:
                for update in self._cache.read(following):
                    following = update[0] + 1
                    yield _cache_update(update, incarnation)
                await wait_set(changed, _IDLE_WAKE_SECONDS)

    async def Drain(  # noqa: N802 - named by the contract
        self, request: engine_pb2.DrainRequest, context: Context
    ) -> AsyncIterator[engine_pb2.DrainProgress]:
        """Takes nothing new and tells what remains until it is empty or the deadline passed."""
        if self._instance.state not in {InstanceState.SERVING, InstanceState.DRAINING}:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"only a serving instance can be drained; it is {self._instance.state}: {self._instance.message}",
            )
        self._drain.begin("asked to drain")
        deadline = request.deadline_milliseconds / 1000 if request.deadline_milliseconds else None
        async for progress in self._drain.follow(deadline):
            yield engine_pb2.DrainProgress(
                remaining_requests=progress.remaining,
                drained=progress.drained,
                deadline_passed=progress.deadline_passed,
            )

    async def SwitchRole(  # noqa: N802 - named by the contract
        self, _request: engine_pb2.SwitchRoleRequest, context: Context
    ) -> engine_pb2.SwitchRoleResponse:
        """Refused: this engine was started for one role."""
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "role switch is not enabled on this instance")

    async def _described(self, context: Context) -> engine_pb2.Instance:
        described = self._instance.describe()
        if described is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"no server is up yet; the instance is {self._instance.state}: {self._instance.message}",
            )
        return described


def _interval_seconds(milliseconds: int) -> float:
    if milliseconds == 0:
        return _DEFAULT_INTERVAL
    return min(_LONGEST_INTERVAL, max(_SHORTEST_INTERVAL, milliseconds / 1000))


def _cache_update(update: Update, incarnation: int) -> engine_pb2.CacheUpdate:
    sequence, change = update
    message = engine_pb2.CacheUpdate(sequence=sequence, incarnation=incarnation)
    match change:
        case SnapshotPart():
            message.snapshot.tier = _TIERS[change.tier]
            message.snapshot.blocks.extend(change.blocks)
            message.snapshot.first = change.first
            message.snapshot.last = change.last
        case Stored():
            message.stored.tier = _TIERS[change.tier]
            message.stored.blocks.extend(change.blocks)
        case Removed():
            message.removed.tier = _TIERS[change.tier]
            message.removed.blocks.extend(change.blocks)
        case _:
            message.cleared.SetInParent()
    return message
