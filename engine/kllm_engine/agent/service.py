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
from kllm_core.objectives import Role
from kllm_core.wire import ROLE_OF, STATES
from kllm_engine.agent.books import Books
from kllm_engine.agent.cache.book import SnapshotPart, Update
from kllm_engine.agent.cache.changes import Removed, Stored, Tier
from kllm_engine.agent.changes import wait_set
from kllm_engine.agent.drain import DrainWatch
from kllm_engine.agent.flip import FlipBrokenError, FlipRefusedError, RoleFlip
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import delta
from kllm_engine.agent.requests import SlowSubscriberError
from kllm_engine.agent.slot import AssumeRefusedError, Slot

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
        books: newest load, parked requests and milestones, what the KV cache holds.
        drain: begins a drain and follows it.
        flip: switches the role.
        slot: takes the role that a slot is told.
    """

    def __init__(self, *, instance: Instance, books: Books, drain: DrainWatch, flip: RoleFlip, slot: Slot) -> None:
        self._instance = instance
        self._loads = books.loads
        self._requests = books.requests
        self._cache = books.cache
        self._drain = drain
        self._flip = flip
        self._slot = slot

    async def GetInstance(  # noqa: N802 - named by the contract
        self, _request: engine_pb2.GetInstanceRequest, context: Context
    ) -> engine_pb2.Instance:
        """Facts of this incarnation."""
        described = await self._described(context)
        words = self._loads.pace_words()
        if described.pacing and words:
            described.pacing += f" ({words})"
        return described

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
                if self._instance.incarnation != incarnation:
                    # The engine has switched roles: what was told of its cache has ended with the incarnation.
                    incarnation, following = self._instance.incarnation, 0
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
        self, request: engine_pb2.SwitchRoleRequest, context: Context
    ) -> engine_pb2.SwitchRoleResponse:
        """Makes the drained instance serve the other role."""
        role = await _role(request.role, context)
        try:
            flipped = await self._flip.run(role)
        except FlipRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except FlipBrokenError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return engine_pb2.SwitchRoleResponse(switch_seconds=flipped.seconds, incarnation=flipped.incarnation)

    async def Assume(  # noqa: N802 - named by the contract
        self, request: engine_pb2.AssumeRequest, context: Context
    ) -> engine_pb2.AssumeResponse:
        """Makes a slot start a server of a role."""
        role = await _role(request.role, context)
        try:
            state = self._slot.assume(role)
        except AssumeRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return engine_pb2.AssumeResponse(state=STATES[state])

    async def _described(self, context: Context) -> engine_pb2.Instance:
        described = self._instance.describe()
        if described is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"no server is up yet; the instance is {self._instance.state}: {self._instance.message}",
            )
        return described


async def _role(told: engine_pb2.Role, context: Context) -> Role:
    role = ROLE_OF.get(told)
    if role is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "role must be ROLE_PREFILL or ROLE_DECODE")
    return role


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
