"""What a new leader knows of what the one before it did, and what a replica that does not lead leaves alone."""

from __future__ import annotations

import asyncio

import pytest
from service.service_world import ready, service

from kllm_operator.kube.resources import (
    DEPLOYMENTS,
    PREFILL_POOLS,
)


async def test_a_new_replica_takes_over_without_a_write(world):
    await ready(world)
    # Times and hashes of the status are as they were, so that there is nothing to say.
    other = await world.successor()
    world.api.calls.clear()
    async with other.running():
        other.queue.add(("default", "chat"))
        await other.settled()
        assert len(other.keeper) == 1
    assert world.api.writes == []


async def test_a_new_leader_keeps_up_a_service_whose_present_spec_is_refused(world):
    """What was accepted last is known to it, with what the pools do not hold."""
    await ready(world, router={"replicas": 1, "binding": "Early"})
    world.respec(model={"uri": "ftp://x", "name": "smollm2"})
    await world.until(lambda: world.is_condition("Accepted", "False"))
    await world.settled()
    other = await world.successor()
    world.api.calls.clear()
    async with other.running():
        other.queue.add(("default", "chat"))
        await other.settled()
        assert other.is_condition("Accepted", "False", "InvalidSpec")
        assert "the last accepted spec goes on" in other.condition("Accepted")["message"]
        assert [write for write in world.api.writes if not write[1].startswith("Event/")] == []
        lost = other.pods("decode")[0]
        other.api.remove(lost)
        other.api.remove(other.api.one(DEPLOYMENTS, "chat-router"))
        await other.until(lambda: other.pods("decode") and other.pods("decode") != [lost])
        await other.until(lambda: "Early" in str(other.api.one(DEPLOYMENTS, "chat-router")))


async def test_a_spec_kept_by_another_version_that_this_one_refuses_is_not_used(world):
    await ready(world)
    world.respec(model={"uri": "ftp://x", "name": "smollm2"})
    await world.until(lambda: world.is_condition("Accepted", "False"))
    await world.settled()
    other = await world.successor()
    other.annotate(other.api.one(PREFILL_POOLS, "chat-prefill"), **{"accepted-spec": '{"nonsense": 1}'})
    before = other.names()
    async with other.running():
        other.queue.add(("default", "chat"))
        await other.settled()
        assert list(other.keeper.summaries()) == []
        assert other.names() == before


async def stopped_rollout(world):
    """A revision of prefill of which no instance has served and none is tried any more."""
    await ready(world)
    old = world.pods("prefill")[0]["metadata"]["name"]
    respec_prefill(world, "1")
    tried = set()

    def give_up():
        for pod in world.pods("prefill"):
            if pod["metadata"]["name"] not in {old, *tried}:
                tried.add(pod["metadata"]["name"])
                world.fail(pod, "has no such image")
        return world.is_condition("Progressing", "False", "RolloutStopped")

    await world.until(give_up)
    assert len(tried) == 3
    await world.until(lambda: len(world.pods("prefill")) == 1)
    await world.settled()


def respec_prefill(world, threads):
    template = {"spec": {"containers": [{"name": "engine", "env": [{"name": "THREADS", "value": threads}]}]}}
    world.respec(prefill={**world.service()["spec"]["prefill"], "template": template})


async def test_a_new_leader_does_not_try_a_stopped_rollout_again_until_the_spec_changes(world):
    await stopped_rollout(world)
    other = await world.successor()
    world.api.calls.clear()
    async with other.running():
        other.queue.add(("default", "chat"))
        await other.settled()
        assert world.api.writes == []
        assert other.is_condition("Progressing", "False", "RolloutStopped")
        assert "has no such image" in other.condition("Progressing")["message"]
        respec_prefill(other, "2")
        await other.until(lambda: len(other.pods("prefill")) == 2)


@pytest.mark.parametrize("while_nobody_led", [True, False])
async def test_who_ends_a_pause_has_a_stopped_rollout_tried_again_whoever_leads_then(world, while_nobody_led):
    await stopped_rollout(world)
    world.annotate(world.service(), paused="true")
    await world.until(lambda: world.is_condition("Paused", "True"))
    await world.settled()
    other = await world.successor()
    if while_nobody_led:
        world.annotate(world.service(), paused="false")
    async with other.running():
        other.queue.add(("default", "chat"))
        if not while_nobody_led:
            await other.settled()
            assert len(other.pods("prefill")) == 1
            world.annotate(world.service(), paused="false")
        await other.until(lambda: len(other.pods("prefill")) == 2)


async def test_a_replica_that_does_not_lead_writes_nothing(world):
    world.leading = False
    world.api.seed(service())
    await asyncio.sleep(0.5)
    assert world.api.writes == []
    world.leading = True
    await world.until(lambda: len(world.pods()) == 2)
