"""What instances as pods promise beyond the contract: a change of leaders at any moment, and others' pods."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from substrate.drivers import belongs_to, seen, serving, slot, until
from substrate.polling import polled

from kllm_core import labels
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Request
from kllm_operator.kube.exceptions import ConflictError, ForbiddenError, UnreachableError
from kllm_operator.kube.resources import PODS
from kllm_operator.render.engine import EngineConfig
from kllm_operator.render.engine_template import TemplateError
from kllm_operator.substrate import kubernetes_events
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError

P, D = Role.PREFILL, Role.DECODE
SLOT, STARTING, SERVING, DRAINING, FAILED = (
    InstanceState.SLOT, InstanceState.STARTING, InstanceState.SERVING, InstanceState.DRAINING, InstanceState.FAILED,
)  # fmt: skip


def annotation(driver, name, key):
    return (driver.pod(name)["metadata"].get("annotations") or {}).get(key)


async def test_a_flip_keeps_the_pod_and_changes_label_owner_and_requests_in_one_write(driver):
    name = await serving(driver, D)
    uid = driver.pod(name)["metadata"]["uid"]
    driver.note(name, labels.REQUESTED, "Flip")
    assert (await seen(driver))[name].requested is Request.FLIP
    await driver.substrate.drain(name, deadline_seconds=5)
    kinds = set()
    driver.api.watchers.append(lambda what, pod: kinds.add((*_role_and_owner(pod), labels.DRAINED in _noted(pod))))
    await driver.substrate.flip(name, P)
    assert kinds == {("decode", "DecodePool", True), ("prefill", "PrefillPool", False)}
    assert driver.pod(name)["metadata"]["uid"] == uid
    assert _noted(driver.pod(name)) == {}
    assert (await seen(driver))[name].requested is None


async def test_a_flip_leaves_what_else_is_asked(driver):
    name = await serving(driver, D)
    await driver.substrate.drain(name, deadline_seconds=5)
    driver.note(name, labels.REQUESTED, "Drain")
    await driver.substrate.flip(name, P)
    assert (await seen(driver))[name].requested is Request.DRAIN


def _role_and_owner(pod):
    return pod["metadata"]["labels"][labels.ROLE], pod["metadata"]["ownerReferences"][0]["kind"]


def _noted(pod):
    return pod["metadata"].get("annotations") or {}


async def test_what_a_person_asks_is_told_and_can_be_dismissed(driver):
    name = await serving(driver)
    for value, told in (("Drain", Request.DRAIN), ("Dance", None)):
        driver.note(name, labels.REQUESTED, value)
        assert (await seen(driver))[name].requested is told
        await driver.substrate.dismiss(name)
        assert annotation(driver, name, labels.REQUESTED) is None


async def test_a_new_leader_knows_who_serves_and_how_drains_have_ended(driver):
    serves, empty, overdue = await serving(driver), await serving(driver), await serving(driver)
    driver.ask(overdue, "busy")
    assert await driver.substrate.drain(empty, deadline_seconds=5)
    assert not await driver.substrate.drain(overdue, deadline_seconds=0.1)
    await driver.take_over()
    found = await seen(driver)
    assert found[serves].state is SERVING
    assert (found[empty].state, found[empty].drained, found[empty].overdue) == (DRAINING, True, False)
    assert (found[overdue].state, found[overdue].drained, found[overdue].overdue) == (DRAINING, False, True)


async def test_a_new_leader_gives_up_no_slot_that_waits_for_longer_than_a_start_may_take(driver):
    name = await slot(driver)
    state = {"name": "engine", "state": {"running": {"startedAt": "2020-01-01T00:00:00Z"}}}
    driver.api.change(driver.pod(name), lambda pod: pod["status"].update(containerStatuses=[state]))
    await driver.take_over()
    assert (await seen(driver))[name].state is STARTING
    await until(driver, name, SLOT)


async def test_a_new_leader_goes_on_with_a_drain(driver):
    name = await serving(driver)
    driver.ask(name, "busy")
    draining = asyncio.create_task(driver.substrate.drain(name, deadline_seconds=30))
    await polled(lambda: annotation(driver, name, labels.DRAIN_UNTIL))
    await driver.take_over()
    await asyncio.gather(draining, return_exceptions=True)
    found = (await seen(driver))[name]
    assert (found.state, found.drained) == (DRAINING, False)
    driver.ask_no_more(name, "busy")
    await polled(lambda: annotation(driver, name, labels.DRAINED) == "true")
    assert (await seen(driver))[name].drained


async def test_a_new_leader_knows_of_a_drain_what_shall_come_then(driver):
    name = await serving(driver, D)
    driver.ask(name, "busy")
    draining = asyncio.create_task(driver.substrate.drain(name, deadline_seconds=30, to=P))
    await polled(lambda: annotation(driver, name, labels.DRAIN_UNTIL))
    await driver.take_over()
    await asyncio.gather(draining, return_exceptions=True)
    assert (await seen(driver))[name].draining_to is P
    driver.ask_no_more(name, "busy")
    await polled(lambda: annotation(driver, name, labels.DRAINED) == "true")
    assert (await seen(driver))[name].draining_to is P
    assert await driver.substrate.flip(name, P) > 0
    assert annotation(driver, name, labels.DRAINING_TO) is None


async def test_a_new_leader_goes_on_with_a_flip_that_the_agent_has_not_begun(driver):
    name = await serving(driver, D)
    await driver.substrate.drain(name, deadline_seconds=5)
    await driver.substrate.close()
    driver.note(name, labels.SWITCHING_TO, "prefill")
    await driver.take_over()
    found = (await seen(driver))[name]
    assert (found.role, found.state) == (P, STARTING)
    await until(driver, name, SERVING)
    assert belongs_to(driver, name) == ("prefill", "chat-prefill")


async def test_a_new_leader_waits_for_a_flip_that_is_going_on(driver):
    name = await serving(driver, D)
    await driver.substrate.drain(name, deadline_seconds=5)
    driver.ask(name, "stuck")
    flipping = asyncio.create_task(driver.substrate.flip(name, P))
    await polled(lambda: annotation(driver, name, labels.SWITCHING_TO))
    await driver.take_over()
    await asyncio.gather(flipping, return_exceptions=True)
    assert ((await seen(driver))[name].role, (await seen(driver))[name].state) == (P, STARTING)
    driver.ask_no_more(name, "stuck")
    await until(driver, name, SERVING)
    assert belongs_to(driver, name) == ("prefill", "chat-prefill")


async def test_a_flip_that_the_agent_has_made_is_written_when_the_api_server_is_back(driver):
    name = await serving(driver, D)
    await driver.substrate.drain(name, deadline_seconds=5)
    driver.ask(name, "stuck")
    flipping = asyncio.create_task(driver.substrate.flip(name, P))
    await polled(lambda: annotation(driver, name, labels.SWITCHING_TO))
    failed = []

    def away(verb, resource, name):
        failed.append(verb)
        return UnreachableError("no answer") if verb == "patch" else None

    driver.api.fail = away
    driver.ask_no_more(name, "stuck")
    await polled(lambda: "patch" in failed)
    assert (await seen(driver))[name].state is STARTING
    driver.api.fail = lambda *_: None
    assert await flipping > 0
    assert belongs_to(driver, name) == ("prefill", "chat-prefill")


async def test_a_new_leader_takes_back_a_flip_that_the_agent_refuses(driver):
    name = await serving(driver, D)
    await driver.substrate.drain(name, deadline_seconds=5)
    await driver.substrate.close()
    driver.ask(name, "refuses")
    driver.note(name, labels.SWITCHING_TO, "prefill")
    await driver.take_over()
    await polled(lambda: annotation(driver, name, labels.SWITCHING_TO) is None)
    found = (await seen(driver))[name]
    assert (found.role, found.state, found.drained) == (D, DRAINING, True)


async def test_a_new_leader_asks_the_agent_of_a_slot_that_was_given_a_role(driver):
    name = await slot(driver)
    await driver.substrate.close()
    driver.api.change(driver.pod(name), lambda pod: pod["metadata"]["labels"].update({labels.ROLE: "prefill"}))
    await driver.take_over()
    assert (await seen(driver))[name].state is STARTING
    await until(driver, name, SERVING)


async def test_pods_with_equal_labels_that_the_pools_do_not_own_are_left_alone(driver):
    mine = await serving(driver)
    for number, owner in enumerate(
        ([], [{"kind": "PrefillPool", "name": "other-prefill", "uid": "another", "controller": True}])
    ):
        metadata = driver.pod(mine)["metadata"] | {"name": f"chat-engine-other{number}", "ownerReferences": owner}
        driver.api.seed({**driver.pod(mine), "metadata": metadata})
        driver.cache.put(driver.pod(f"chat-engine-other{number}"))
    assert list(await seen(driver)) == [mine]
    await driver.substrate.stop("chat-engine-other0")
    with pytest.raises(StepRefusedError):
        await driver.substrate.drain("chat-engine-other1", deadline_seconds=1)
    assert {"chat-engine-other0", "chat-engine-other1"} <= set(driver.api.names(PODS))
    assert {name for verb, name in driver.api.writes if "other" in name} == set()


@pytest.mark.parametrize("deleted", [True, False])
async def test_pods_of_a_pool_that_was_deleted_count_until_they_are_gone_and_nothing_is_done_to_them(driver, deleted):
    """Kubernetes' collector may not have come to them yet."""
    name = await serving(driver, D)

    def orphan(pod):
        pod["metadata"]["ownerReferences"][0]["uid"] = "of-the-pool-before"
        if deleted:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"

    driver.api.change(driver.pod(name), orphan)
    found = (await seen(driver))[name]
    assert (found.role, found.ending, found.agent) == (D, True, None)
    writes = len(driver.api.writes)
    for step in (driver.substrate.stop(name), driver.substrate.cancel(name)):
        await step
    with pytest.raises(StepRefusedError):
        await driver.substrate.drain(name, deadline_seconds=1)
    assert len(driver.api.writes) == writes
    driver.api.remove(driver.pod(name))
    assert name not in await seen(driver)


async def test_another_pod_of_the_same_name_is_not_deleted(driver):
    name = await serving(driver)
    old = driver.pod(name)

    def replaced(verb, resource, which):
        if verb == "delete" and driver.pod(name)["metadata"]["uid"] == old["metadata"]["uid"]:
            driver.api.watchers.clear()  # the operator has not heard of it yet
            driver.api.remove(old)
            driver.api.seed({**old, "metadata": {**old["metadata"], "ownerReferences": []}})

    driver.api.fail = replaced
    stopping = asyncio.create_task(driver.substrate.stop(name))
    await polled(lambda: not driver.api.watchers)
    driver.cache.remove(old)
    driver.substrate.notice()
    await stopping
    assert driver.pod(name)["metadata"]["uid"] != old["metadata"]["uid"]


async def test_one_that_someone_else_deletes_is_ending_until_it_is_gone(driver):
    name = await serving(driver)
    driver.ask(name, "busy")
    told = []
    driver.substrate.subscribe(lambda: told.append(1))
    uid = driver.pod(name)["metadata"]["uid"]
    await driver.api.delete(PODS, namespace="default", name=name, uid=uid)
    found = (await seen(driver)).get(name)
    assert found is None or (found.ending and "someone else" in found.message)
    await until(driver, name, None)
    assert told


async def test_one_that_is_deleted_by_force_is_gone_at_once(driver):
    name = await serving(driver)
    driver.api.remove(driver.pod(name))
    assert name not in await seen(driver)
    await driver.substrate.stop(name)


async def test_a_write_in_between_is_no_obstacle(driver):
    name = await serving(driver)
    first = []

    def meddle(verb, resource, which):
        if verb == "patch" and not first:
            first.append(which)
            driver.api.change(driver.pod(name), lambda pod: pod["metadata"]["labels"].update({"else": "1"}))
            return ConflictError("changed in between")
        return None

    driver.api.fail = meddle
    assert await driver.substrate.drain(name, deadline_seconds=5)
    assert first
    assert driver.pod(name)["metadata"]["labels"]["else"] == "1"


async def test_a_name_that_is_taken_is_passed_over(driver):
    driver.api.seed(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": driver.next_name(), "namespace": "default"}}
    )
    assert await driver.substrate.start(P) == "chat-engine-00001"


async def test_a_start_whose_answer_was_lost_is_not_made_a_second_time(driver):
    """The server made the pod, and neither the answer nor the watch has told of it."""
    create, watchers = driver.api.create, list(driver.api.watchers)

    async def lost(document):
        driver.api.watchers.clear()
        await create(document)
        raise UnreachableError("the connection broke")

    driver.api.create = lost
    with pytest.raises(SubstrateError, match="not known whether a pod was made"):
        await driver.substrate.start(P)
    driver.api.create = create
    assert await driver.substrate.start(P) == "chat-engine-00000"
    assert driver.api.names(PODS) == ["chat-engine-00000"]
    driver.api.watchers.extend(watchers)
    assert await driver.substrate.start(P) == "chat-engine-00001"


async def test_what_the_api_server_refuses_is_an_error_with_its_words_and_leaves_nothing(driver):
    driver.api.fail = lambda verb, *_: ForbiddenError("exceeded quota: gpus") if verb == "create" else None
    with pytest.raises(SubstrateError, match="exceeded quota: gpus"):
        await driver.substrate.start(P)
    assert await seen(driver) == {}


async def test_a_drain_that_cannot_be_written_has_not_begun(driver):
    name = await serving(driver)
    driver.api.fail = lambda verb, *_: UnreachableError("no answer") if verb == "patch" else None
    with pytest.raises(SubstrateError, match="no answer"):
        await driver.substrate.drain(name, deadline_seconds=5)
    assert (await seen(driver))[name].state is SERVING


async def test_without_its_pool_nothing_is_started(driver):
    driver.substrate.use(replace(driver.plan, owners={}))
    with pytest.raises(SubstrateError, match="the prefill pool of chat is not there"):
        await driver.substrate.start(P)


async def test_a_plan_with_a_bad_template_leaves_the_old_one(driver):
    before = driver.substrate.revision(P)
    with pytest.raises(TemplateError):
        driver.substrate.use(
            replace(driver.plan, config=EngineConfig("x", template={"spec": {"restartPolicy": "Always"}}))
        )
    assert driver.substrate.revision(P) == before


async def test_a_pod_that_no_node_takes_is_starting_and_says_why_and_is_gone_at_once(driver):
    driver.api.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    name = await driver.substrate.start(P)
    await polled(lambda: driver.pod(name).get("status"))
    found = (await seen(driver))[name]
    assert (found.state, found.reason) == (STARTING, "Unschedulable")
    assert "Insufficient nvidia.com/gpu" in found.message
    await driver.substrate.cancel(name)
    assert driver.nothing_of(name)


async def test_a_pod_that_hangs_says_what_events_say_of_it_until_it_runs(driver, monkeypatch):
    monkeypatch.setattr(kubernetes_events, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes_events, "_AGAIN_SECONDS", 0.02)
    note = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /srv/llama is not a directory'
    driver.api.hangs = note
    name = await driver.substrate.start(P)
    found = await until(driver, name, STARTING, lambda each: each.reason)
    assert (found.reason, found.message) == ("FolderNotFound", f"FailedMount: {note}")
    driver.api.go_on(name)
    assert not (await until(driver, name, SERVING)).reason


async def test_a_kubelet_that_has_not_read_a_secret_yet_is_no_problem(driver, monkeypatch):
    monkeypatch.setattr(kubernetes_events, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes_events, "_AGAIN_SECONDS", 0.02)
    driver.api.hangs = (
        'MountVolume.SetUp failed for volume "fleet-token" : failed to sync secret cache: '
        "timed out waiting for the condition"
    )
    name = await driver.substrate.start(P)
    lists = []
    monkeypatch.setattr(driver.api, "list", _counted(driver.api.list, lists))
    await polled(lambda: len(lists) >= 2)
    assert not (await seen(driver))[name].reason


def _counted(call, calls):
    async def counted(*arguments, **more):
        found = await call(*arguments, **more)
        calls.append(found)
        return found

    return counted


async def test_closed_it_begins_nothing_and_touches_no_pod(driver):
    name = await serving(driver)
    driver.ask(name, "busy")
    draining = asyncio.create_task(driver.substrate.drain(name, deadline_seconds=30))
    await polled(lambda: annotation(driver, name, labels.DRAIN_UNTIL))
    await driver.substrate.close()
    await asyncio.gather(draining, return_exceptions=True)
    writes = len(driver.api.writes)
    driver.substrate.notice()
    await asyncio.sleep(0)
    assert len(driver.api.writes) == writes
    assert name in driver.api.processes
