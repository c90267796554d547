"""Pools that no service owns: from their manifest to pods and status, alone and in pairs, and beside services."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service import service_world
from service.service_world import World, pool, service

from kllm_core import labels
from kllm_operator.kube.resources import (
    DECODE_POOLS,
    NETWORK_POLICIES,
    PODS,
    PREFILL_POOLS,
    SECRETS,
    SERVICE_ACCOUNTS,
)
from kllm_operator.render.config import NetworkConfig
from kllm_operator.service import pool_runtime
from kllm_operator.service.standalone import PoolKey

P, D = {"resource": PREFILL_POOLS}, {"resource": DECODE_POOLS}
IN_PAIR = {"labels": {labels.SERVICE: "pair"}}


async def ready(world, *pools):
    """Pools that serve."""
    for each in pools or [pool()]:
        world.api.seed(each)
    await world.until(lambda: len(world.pods()) == len(pools or [1]))
    for pod in world.pods():
        world.serve(pod)
    for each in pools or [pool()]:
        which = P if each["kind"] == "PrefillPool" else D
        await world.until(
            lambda each=each, which=which: world.is_condition("Ready", "True", name=each["metadata"]["name"], **which)
        )
    await world.settled()


def scale(world, resource, count, name="chat"):
    world.api.change(world.api.one(resource, name), lambda document: document["spec"].update(replicas=count))


def counts(world, resource=PREFILL_POOLS, name="chat"):
    status = world.api.one(resource, name)["status"]
    return status["desired"], status["ready"], status["warming"], status["replicas"]


async def test_a_pool_alone_becomes_pods_of_its_role_and_says_when_they_serve(world):
    await ready(world)
    (pod,) = world.pods("prefill")
    assert [name for name in world.names() if not name.startswith("Pod/")] == [
        "PrefillPool/chat", "Secret/chat-fleet-token", "ServiceAccount/chat-engine",
    ]  # fmt: skip
    assert pod["metadata"]["ownerReferences"][0]["uid"] == world.api.one(PREFILL_POOLS, "chat")["metadata"]["uid"]
    assert pod["spec"]["serviceAccountName"] == "chat-engine"
    status = world.api.one(PREFILL_POOLS, "chat")["status"]
    assert counts(world) == (1, 1, 0, 1)
    assert status["observedGeneration"] == 1
    assert "advised" not in status
    selected = dict(part.split("=") for part in status["selector"].split(","))
    assert selected.items() <= pod["metadata"]["labels"].items()
    ((of, role, told),) = world.keeper.pools()
    assert (of, role, told.ready) == (("default", "chat"), "prefill", 1)
    told = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert told == {
        "Ready": ("True", "MinimumReady"), "Accepted": ("True", "Valid"), "Progressing": ("False", "Settled"),
        "ScalingLimited": ("False", "WithinLimits"), "Degraded": ("False", "AsExpected"),
        "Paused": ("False", "NotPaused"),
    }  # fmt: skip


async def test_pods_follow_the_count_that_others_write_within_the_bounds_and_it_stays_theirs(world):
    await ready(world)
    scale(world, PREFILL_POOLS, 2)
    await world.until(lambda: len(world.pods()) == 2)
    await world.until(lambda: counts(world) == (2, 1, 1, 2))
    assert world.is_condition("Progressing", "True", "Scaling", name="chat", **P)
    scale(world, PREFILL_POOLS, 9)
    await world.until(lambda: world.is_condition("ScalingLimited", "True", "OutOfBounds", name="chat", **P))
    await world.until(lambda: len(world.pods()) == 3)
    assert world.api.one(PREFILL_POOLS, "chat")["spec"]["replicas"] == 9
    scale(world, PREFILL_POOLS, 0)
    await world.until(lambda: len(world.pods()) == 1)


async def test_a_resync_writes_nothing_when_nothing_changed_and_a_new_replica_takes_over_without_a_write(world):
    await ready(world, pool(), pool("DecodePool"))
    world.api.calls.clear()
    for kind in ("PrefillPool", "DecodePool"):
        world.queue.add(PoolKey("default", "chat", kind))
    await world.settled()
    assert world.api.writes == []
    other = await world.successor()
    async with other.running():
        for kind in ("PrefillPool", "DecodePool"):
            other.queue.add(PoolKey("default", "chat", kind))
        await other.settled()
        assert len(other.keeper._runtimes) == 2
    assert world.api.writes == []


async def test_a_failed_instance_is_replaced_and_the_status_says_why(world):
    await ready(world)
    (failed,) = world.pods()
    world.fail(failed, "CUDA error: out of memory")
    await world.until(lambda: [pod for pod in world.pods() if pod["metadata"]["uid"] != failed["metadata"]["uid"]])
    await world.until(lambda: world.is_condition("Degraded", "True", "InstanceFailing", name="chat", **P))
    assert world.is_condition("Ready", "False", name="chat", **P)
    assert any(event["reason"] == "InstanceFailed" for event in world.events())


async def test_slots_are_kept_beside_the_instances(world):
    await ready(world)
    world.api.change(world.api.one(PREFILL_POOLS, "chat"), lambda document: document["spec"].update(slots=1))
    await world.until(lambda: len(world.pods(labels.ROLE_SLOT)) == 1)
    assert len(world.pods("prefill")) == 1


async def test_a_changed_template_brings_a_new_instance_before_the_old_one_leaves(world):
    await ready(world)
    (old,) = world.pods()
    template = {"metadata": {"annotations": {"example.com/try": "2"}}}
    world.api.change(world.api.one(PREFILL_POOLS, "chat"), lambda document: document["spec"].update(template=template))
    await world.until(lambda: len(world.pods()) == 2)
    assert world.api.one(PODS, old["metadata"]["name"])["metadata"]["uid"] == old["metadata"]["uid"]
    await world.until(lambda: world.is_condition("Progressing", "True", "RollingOut", name="chat", **P))


async def test_a_paused_pool_is_observed_and_nothing_is_done(world):
    await ready(world)
    world.annotate(world.api.one(PREFILL_POOLS, "chat"), paused="true")
    await world.until(lambda: world.is_condition("Paused", "True", name="chat", **P))
    scale(world, PREFILL_POOLS, 2)
    await world.until(lambda: world.api.one(PREFILL_POOLS, "chat")["status"]["observedGeneration"] == 2)
    await world.settled()
    assert len(world.pods()) == 1
    world.annotate(world.api.one(PREFILL_POOLS, "chat"), paused="false")
    await world.until(lambda: len(world.pods()) == 2)


async def test_a_pool_that_is_paused_from_its_first_day_gets_nothing(world):
    world.api.seed(pool(metadata={"annotations": {labels.PAUSED: "true"}}))
    await world.until(lambda: world.is_condition("Paused", "True", name="chat", **P))
    await world.settled()
    assert world.names() == ["PrefillPool/chat"]


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        (pool(model={"uri": "ftp://x", "name": "a"}), "InvalidSpec", "spec.model.uri"),
        (pool(minReplicas=5), "InvalidSpec", "minReplicas"),
        (pool("DecodePool", parallelism={"tensor": 2, "context": 2}), "InvalidSpec", "context"),
        (pool(template={"spec": {"restartPolicy": "Always"}}), "TemplateRefused", "spec.template.spec.restartPolicy"),
        (pool("DecodePool", nonsense=1), "InvalidSpec", "nonsense"),
        (pool(metadata={"labels": {labels.SERVICE: "Not.A-Name"}}), "InvalidSpec", labels.SERVICE),
    ],
)
async def test_a_spec_that_cannot_be_carried_out_is_refused_with_the_field_and_makes_nothing(
    world, given, reason, words
):
    which = P if given["kind"] == "PrefillPool" else D
    world.api.seed(given)
    await world.until(lambda: world.is_condition("Accepted", "False", reason, name="chat", **which))
    assert words in world.condition("Accepted", "chat", **which)["message"]
    assert world.is_condition("Ready", "False", reason, name="chat", **which)
    await world.settled()
    assert world.names() == [f"{given['kind']}/chat"]
    assert any(words in event["note"] for event in world.events())


async def test_a_bad_change_leaves_the_instances_until_it_is_mended(world):
    await ready(world)
    world.api.change(world.api.one(PREFILL_POOLS, "chat"), lambda document: document["spec"].update(nonsense=1))
    await world.until(lambda: world.is_condition("Accepted", "False", name="chat", **P))
    assert "the last accepted spec goes on" in world.condition("Accepted", "chat", **P)["message"]
    assert world.is_condition("Ready", "True", name="chat", **P)
    scale(world, PREFILL_POOLS, 2)
    await world.until(lambda: len(world.pods()) == 2)


async def test_pools_of_one_service_share_account_and_token_which_go_with_the_last_of_them(world):
    await ready(world, pool(name="p", metadata=IN_PAIR), pool("DecodePool", "d", metadata=IN_PAIR))
    assert {pod["metadata"]["labels"][labels.SERVICE] for pod in world.pods()} == {"pair"}
    assert world.api.names(SECRETS) == ["pair-fleet-token"]
    assert world.api.names(SERVICE_ACCOUNTS) == ["pair-engine"]
    token = world.api.one(SECRETS, "pair-fleet-token")
    world.api.remove(world.api.one(PREFILL_POOLS, "p"))
    await world.settled()
    assert [pod["metadata"]["labels"][labels.ROLE] for pod in world.pods()] == ["decode"]
    assert world.api.one(SECRETS, "pair-fleet-token") == token
    # The pool that stays has the account alone, and one that comes shares it again.
    (owner,) = world.api.one(SERVICE_ACCOUNTS, "pair-engine")["metadata"]["ownerReferences"]
    assert owner["kind"] == "DecodePool"
    world.api.seed(pool(name="p", metadata=IN_PAIR))
    await world.until(lambda: len(world.pods("prefill")) == 1)
    await world.settled()
    assert len(world.api.one(SERVICE_ACCOUNTS, "pair-engine")["metadata"]["ownerReferences"]) == 2
    assert world.api.one(SECRETS, "pair-fleet-token") == token
    world.api.remove(world.api.one(DECODE_POOLS, "d"))
    world.api.remove(world.api.one(PREFILL_POOLS, "p"))
    await world.until(lambda: not world.keeper._runtimes)
    await world.settled()
    assert world.names() == []


async def test_who_may_call_the_engines_is_kept_so_and_goes_with_the_last_pool(monkeypatch):
    network = NetworkConfig("kllm-system", {"app": "operator"})
    monkeypatch.setattr(service_world, "RENDER", replace(service_world.RENDER, network=network))
    async with World().running() as world:
        await ready(world, pool(), pool("DecodePool"))
        world.api.remove(world.api.one(NETWORK_POLICIES, "chat-engine"))
        await world.until(lambda: world.api.one(NETWORK_POLICIES, "chat-engine"))
        world.api.remove(world.api.one(PREFILL_POOLS, "chat"))
        await world.settled()
        assert world.api.names(NETWORK_POLICIES) == ["chat-engine"]
        world.api.remove(world.api.one(DECODE_POOLS, "chat"))
        await world.settled()
        assert world.names() == []


async def test_an_instance_of_one_pool_is_no_news_to_the_other(world):
    await ready(world, pool(), pool("DecodePool"))
    reconciles = world.reconciles
    for pod in world.pods():
        world.api.change(pod, lambda document: document["metadata"]["annotations"].update(theirs="1"))
    await world.settled()
    assert world.reconciles == reconciles


async def test_a_token_that_is_deleted_is_made_anew_once_no_engine_of_either_pool_has_it(world, monkeypatch):
    monkeypatch.setattr(pool_runtime, "TOKEN_SECONDS", 0.1)
    await ready(world, pool(minReplicas=0), pool("DecodePool", minReplicas=0))
    before = world.api.one(SECRETS, "chat-fleet-token")
    world.api.remove(before)
    for resource in (PREFILL_POOLS, DECODE_POOLS):
        scale(world, resource, 0)
    world.api.remove(world.pods("prefill")[0])
    await world.settled()
    assert world.api.names(SECRETS) == []
    world.api.remove(world.pods("decode")[0])
    after = await world.until(lambda: world.api.one(SECRETS, "chat-fleet-token"))
    assert after["data"] != before["data"]
    await world.settled()
    tokens = {runtime._token for runtime in world.keeper._runtimes.values()}
    assert len(tokens) == 1


@pytest.mark.parametrize(
    ("late", "reason", "words"),
    [
        (pool(name="late", metadata=IN_PAIR), "NameTaken", "PrefillPool p"),
        (pool("DecodePool", "late", metadata=IN_PAIR, cache={"pageSize": 32}), "InvalidSpec", "spec.cache.pageSize"),
        (
            pool("DecodePool", "late", metadata=IN_PAIR, model={"uri": "demo://smollm2-135m", "name": "other"}),
            "InvalidSpec", "spec.model.name is other here and smollm2",
        ),
    ],
)  # fmt: skip
async def test_a_pool_that_does_not_fit_those_of_its_service_is_refused_until_they_are_gone(world, late, reason, words):
    await ready(world, pool(name="p", metadata=IN_PAIR))
    which = {"name": "late", "resource": PREFILL_POOLS if late["kind"] == "PrefillPool" else DECODE_POOLS}
    world.api.seed(late)
    await world.until(lambda: world.is_condition("Accepted", "False", reason, **which))
    assert words in world.condition("Accepted", **which)["message"]
    assert world.is_condition("Accepted", "True", name="p", **P)
    await world.settled()
    assert len(world.pods()) == 1
    world.api.remove(world.api.one(PREFILL_POOLS, "p"))
    await world.until(lambda: world.is_condition("Accepted", "True", **which))
    await world.until(lambda: len(world.pods()) == 1)


async def test_who_had_instances_of_a_service_first_is_not_driven_out_by_an_older_pool_that_comes_to_it(world):
    older = world.api.seed(pool(name="older", metadata={"annotations": {labels.PAUSED: "true"}}, nonsense=1))
    world.api.change(older, lambda document: document["metadata"].update(creationTimestamp="2025-01-01T00:00:00Z"))
    await ready(world, pool(name="p", metadata=IN_PAIR))

    def come(document):
        document["metadata"].update(IN_PAIR, annotations={})
        del document["spec"]["nonsense"]

    world.api.change(world.api.one(PREFILL_POOLS, "older"), come)
    await world.until(lambda: world.is_condition("Accepted", "False", "NameTaken", name="older", **P))
    other = await world.successor()
    async with other.running():
        other.queue.add(PoolKey("default", "p", "PrefillPool"))
        await other.settled()
        assert other.is_condition("Accepted", "True", name="p", **P)
        assert len(other.pods()) == 1


async def test_the_service_of_a_pool_with_instances_cannot_be_changed(world):
    await ready(world)
    world.api.change(world.api.one(PREFILL_POOLS, "chat"), lambda document: document["metadata"].update(IN_PAIR))
    await world.until(lambda: world.is_condition("Accepted", "False", "InvalidSpec", name="chat", **P))
    assert "cannot be changed from chat to pair" in world.condition("Accepted", "chat", **P)["message"]
    scale(world, PREFILL_POOLS, 2)
    await world.until(lambda: len(world.pods()) == 2)
    assert {pod["metadata"]["labels"][labels.SERVICE] for pod in world.pods()} == {"chat"}
    world.api.change(world.api.one(PREFILL_POOLS, "chat"), lambda document: document["metadata"].pop("labels"))
    await world.until(lambda: world.is_condition("Accepted", "True", name="chat", **P))


async def test_a_pool_that_has_the_name_of_a_service_is_refused_and_takes_nothing_of_it(world):
    world.api.seed(service())
    await world.until(lambda: len(world.pods()) == 2)
    await world.settled()
    before = world.names()
    world.api.seed(pool())
    await world.until(lambda: world.is_condition("Accepted", "False", "NameTaken", name="chat", **P))
    assert "InferenceService chat" in world.condition("Accepted", "chat", **P)["message"]
    await world.settled()
    assert world.names() == sorted([*before, "PrefillPool/chat"])
    assert world.is_condition("Degraded", "False")
    world.api.remove(world.service())
    await world.until(lambda: world.is_condition("Accepted", "True", name="chat", **P))
    await world.until(lambda: len(world.pods("prefill")) == 1)


@pytest.mark.parametrize("name", ["chat", "chat-prefill"])
async def test_a_service_whose_name_or_pool_is_taken_by_a_pool_says_so_and_the_pool_goes_on(world, name):
    await ready(world, pool(name=name))
    world.api.seed(service())
    await world.until(lambda: world.is_condition("Degraded", "True", "NameTaken"))
    await world.settled()
    assert len(world.pods()) == 1
    assert world.is_condition("Ready", "True", name=name, **P)
    other = await world.successor()
    async with other.running():
        other.queue.add(PoolKey("default", name, "PrefillPool"))
        other.queue.add(("default", "chat"))
        await other.settled()
        assert other.is_condition("Accepted", "True", name=name, **P)
        assert len(other.pods()) == 1
        other.api.remove(other.api.one(PREFILL_POOLS, name))
        await other.until(lambda: len(other.pods("prefill")) == len(other.pods("decode")) == 1)


async def test_an_account_of_somebody_else_is_left_alone_and_told(world):
    theirs = world.api.seed(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat-engine", "namespace": "default"}}
    )
    world.api.seed(pool())
    await world.until(lambda: world.is_condition("Degraded", "True", "NameTaken", name="chat", **P))
    assert world.is_condition("Ready", "False", "NameTaken", name="chat", **P)
    assert world.api.one(SERVICE_ACCOUNTS, "chat-engine") == theirs
    world.api.remove(theirs)
    await world.until(lambda: len(world.pods()) == 1)


async def test_pools_of_a_service_are_the_services_and_those_of_strangers_are_standalone(world):
    world.api.seed(service())
    await world.until(lambda: len(world.pods()) == 2)
    stranger = {"apiVersion": "example.com/v1", "kind": "InferenceService", "name": "x", "uid": "x", "controller": True}
    world.api.seed(pool(name="other", metadata={"ownerReferences": [stranger]}))
    await world.until(lambda: len(world.pods()) == 3)
    await world.settled()
    assert set(world.keeper._runtimes) == {("default", "chat"), PoolKey("default", "other", "PrefillPool")}
    assert len(world.keeper) == 1


async def test_a_pool_that_is_being_deleted_gets_no_new_pods(world):
    await ready(world)
    world.api.change(
        world.api.one(PREFILL_POOLS, "chat"),
        lambda document: document["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
    )
    await world.until(lambda: not world.keeper._runtimes)
    world.api.remove(world.pods()[0])
    await world.settled()
    assert world.pods() == []
