"""An instance changes sides, over and over, and nobody can tell it from one that was always there."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from bare_fleet import METADATA, Agent, BareFleet, bare_fleet
from plain_server import PlainServer, plain_server_in

from kllm_core.blocks import block_hashes
from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role

pytestmark = pytest.mark.engines

TOKENS = 24
PAGE = 16
SERVED_SECONDS = 20.0
"""Far less than the minutes for which SGLang waits for a peer that does not answer."""


def prompt(length: int, seed: int) -> list[int]:
    """Token ids without special ones; the tiny model has 512."""
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


def family(seed: int) -> list[list[int]]:
    """Prompts that share a prefix, and one of several chunks that does not."""
    base = prompt(200, seed)
    return [base, base + prompt(50, seed + 1), base + prompt(90, seed + 2), prompt(700, seed + 3)]


@dataclass
class Trio:
    """A prefill and a decode instance that stay, and one that changes sides."""

    fleet: BareFleet
    prefill: Agent
    decode: Agent
    mover: Agent
    plain: PlainServer

    async def pair(self) -> tuple[engine_pb2.Instance, engine_pb2.Instance]:
        """The mover with its counterpart."""
        mover = await self.mover.instance()
        if mover.role == engine_pb2.ROLE_PREFILL:
            return mover, await self.decode.instance()
        return await self.prefill.instance(), mover

    async def check(self, prompts: list[list[int]]) -> None:
        """The mover and its counterpart yield what a plain server yields, with and without what is cached."""
        prefill, decode = await self.pair()
        for _ in range(2):
            for ids in prompts:
                async with asyncio.timeout(SERVED_SECONDS):
                    answer = await self.fleet.generate(prefill, decode, ids, TOKENS)
                assert answer["output_ids"] == await self.plain.generate(ids, TOKENS)

    async def flip(self, role: Role) -> engine_pb2.SwitchRoleResponse:
        """Drain the mover and switch it."""
        assert (await self.mover.drain()).drained
        return await self.mover.switch(role)


@pytest.fixture(scope="module")
async def trio() -> AsyncIterator[Trio]:
    async with bare_fleet() as fleet:
        agents = [
            await fleet.start("stays-prefill", Role.PREFILL),
            await fleet.start("stays-decode", Role.DECODE),
            await fleet.start("mover", Role.PREFILL),
        ]
        await asyncio.gather(*(agent.serving() for agent in agents))
        async with plain_server_in(fleet.run, model=fleet.model, token=fleet.token, context_tokens=4096) as plain:
            yield Trio(fleet, *agents, plain)


async def test_outputs_are_those_of_a_plain_server_before_and_after_each_of_several_switches(trio: Trio):
    await trio.check(family(1))
    for round_, role in enumerate([Role.DECODE, Role.PREFILL] * 2):
        began = time.monotonic()
        switched = await trio.flip(role)
        seconds = time.monotonic() - began
        instance = await trio.mover.instance()
        assert instance.incarnation == switched.incarnation
        assert list(instance.bindings) == [engine_pb2.BINDING_LATE, engine_pb2.BINDING_EARLY]
        assert 0 < switched.switch_seconds < seconds < 10
        await trio.check(family(1))
        await trio.check(family(100 * (round_ + 2)))


async def test_what_the_agent_tells_of_the_cache_is_what_the_present_role_holds(trio: Trio):
    old = family(7)
    await trio.check(old)
    role = Role.DECODE if (await trio.mover.instance()).role == engine_pb2.ROLE_PREFILL else Role.PREFILL
    follower = asyncio.ensure_future(_follow_until(trio.mover, await _cached_blocks(old[0])))
    assert await follower
    switched = await trio.flip(role)
    new = family(8)
    await trio.check(new)

    told = await _follow_until(trio.mover, await _cached_blocks(new[3]), incarnation=switched.incarnation)

    assert not told & await _cached_blocks(old[3])


async def test_requests_that_run_are_finished_before_the_switch_and_others_do_not_notice(trio: Trio):
    for role in (Role.DECODE, Role.PREFILL):
        if (await trio.mover.instance()).role == (
            engine_pb2.ROLE_DECODE if role is Role.DECODE else engine_pb2.ROLE_PREFILL
        ):
            continue
        prompts = [prompt(60 + 40 * n, 500 + n) for n in range(6)]
        references = [await trio.plain.generate(ids, 60) for ids in prompts]
        prefill, decode = await trio.pair()
        own = [asyncio.ensure_future(trio.fleet.generate(prefill, decode, ids, 60)) for ids in prompts]
        await _until_busy(trio.mover)
        stays = await trio.prefill.instance(), await trio.decode.instance()
        others = [asyncio.ensure_future(trio.fleet.generate(*stays, ids, 60)) for ids in prompts]

        await trio.flip(role)

        assert all(task.done() for task in own)
        assert [answer["output_ids"] for answer in await asyncio.gather(*own)] == references
        assert [answer["output_ids"] for answer in await asyncio.gather(*others)] == references
        await trio.check(prompts[:2])


async def test_an_instance_that_serves_is_not_switched(trio: Trio):
    mover = await trio.mover.instance()
    other = Role.DECODE if mover.role == engine_pb2.ROLE_PREFILL else Role.PREFILL
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await trio.mover.switch(other)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await trio.mover.instance()).state == engine_pb2.INSTANCE_STATE_SERVING


async def test_a_request_for_the_role_before_is_refused_at_once(trio: Trio):
    if (await trio.mover.instance()).role == engine_pb2.ROLE_DECODE:
        await trio.flip(Role.PREFILL)
    before = await trio.mover.instance()
    await trio.flip(Role.DECODE)
    body = trio.fleet.body(before, prompt(40, 900), 4)
    async with asyncio.timeout(SERVED_SECONDS):
        answer = await trio.fleet.http.post(f"http://{before.http_address}/generate", json=body)
    assert answer.status_code == 503
    assert "decode instance now" in answer.text
    await trio.check(family(9))


async def _cached_blocks(ids: list[int]) -> set[int]:
    return set(block_hashes(ids, PAGE))


async def _until_busy(agent: Agent) -> None:
    watch = agent.watch(20)
    while not (await watch.read()).running_requests:
        pass
    watch.cancel()


async def _follow_until(agent: Agent, wanted: set[int], *, incarnation: int = 0) -> set[int]:
    """Blocks as a subscriber knows them, once it knows those that are wanted."""
    known: set[int] = set()
    async with asyncio.timeout(30):
        async for update in agent.stub.WatchCache(engine_pb2.WatchCacheRequest(), metadata=METADATA):
            if (update.HasField("snapshot") and update.snapshot.first) or update.HasField("cleared"):
                known.clear()
            known |= set(update.snapshot.blocks) | set(update.stored.blocks)
            known -= set(update.removed.blocks)
            if wanted <= known and (not incarnation or update.incarnation == incarnation):
                return known
    raise AssertionError("the stream ended")
