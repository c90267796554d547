"""A service from its manifest to pods and status, and what changes of it do, on an API server in memory."""

from __future__ import annotations

import random

import pytest
from service.service_world import POOLS, ready, service

from kllm_core import labels
from kllm_operator.kube.exceptions import ConflictError, ForbiddenError, UnreachableError
from kllm_operator.kube.resources import (
    DECODE_POOLS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    PREFILL_POOLS,
    SECRETS,
    SERVICES,
)
from kllm_operator.service import runtime


async def test_a_service_becomes_its_objects_and_one_pod_of_each_role_and_is_ready_when_they_are(world):
    await ready(world)
    engines = [name for name in world.names() if name.startswith("Pod/chat-engine-")]
    assert len(engines) == 2
    assert [name for name in world.names() if name not in engines] == [
        "DecodePool/chat-decode", "Deployment/chat-router", "InferenceService/chat",
        "PodDisruptionBudget/chat-router", "PrefillPool/chat-prefill", "Role/chat-router", "RoleBinding/chat-router",
        "Secret/chat-fleet-token", "Service/chat", "ServiceAccount/chat-engine", "ServiceAccount/chat-router",
    ]  # fmt: skip
    status = world.service()["status"]
    assert status["observedGeneration"] == 1
    assert status["prefill"]["ready"] == status["decode"]["ready"] == status["router"]["ready"] == 1
    assert status["url"] == "http://chat.default.svc"
    pool = world.api.one(PREFILL_POOLS, "chat-prefill")
    assert pool["status"]["replicas"] == 1
    selected = dict(part.split("=") for part in pool["status"]["selector"].split(","))
    assert [pod["metadata"]["name"] for pod in world.pods("prefill")] == [
        pod["metadata"]["name"] for pod in world.pods() if selected.items() <= pod["metadata"]["labels"].items()
    ]


async def test_pods_belong_to_the_pool_of_their_role_and_all_else_to_the_service(world):
    await ready(world)
    uid = world.service()["metadata"]["uid"]
    for (resource, _, name), document in world.api.objects.items():
        owners = [each["uid"] for each in document["metadata"].get("ownerReferences", ()) if each["controller"]]
        if resource == PODS:
            role = document["metadata"]["labels"][labels.ROLE]
            kind = PREFILL_POOLS if role == "prefill" else DECODE_POOLS
            assert owners == [world.api.one(kind, f"chat-{role}")["metadata"]["uid"]]
        elif resource != INFERENCE_SERVICES and resource.kind != "Event":
            assert owners == [uid], name


async def test_a_resync_writes_nothing_when_nothing_changed(world):
    await ready(world)
    world.api.calls.clear()
    for _ in range(3):
        world.queue.add(("default", "chat"))
        await world.settled()
    assert world.api.calls == []


async def test_news_of_an_instance_that_change_nothing_cost_no_reconcile(world):
    await ready(world)
    reconciles = world.reconciles
    for pod in world.pods("decode"):
        world.api.change(pod, lambda document: document["metadata"]["annotations"].update(theirs="1"))
    await world.settled()
    assert world.reconciles == reconciles


async def test_what_someone_changes_or_deletes_is_set_right(world):
    await ready(world)
    world.api.change(world.api.one(SERVICES, "chat"), lambda document: document["spec"].update(type="NodePort"))
    await world.until(lambda: world.api.one(SERVICES, "chat")["spec"]["type"] == "ClusterIP")
    world.api.remove(world.api.one(DEPLOYMENTS, "chat-router"))
    await world.until(lambda: world.api.one(DEPLOYMENTS, "chat-router"))


@pytest.mark.parametrize("resource", [SERVICES, DEPLOYMENTS, PREFILL_POOLS], ids=lambda each: each.kind)
@pytest.mark.parametrize("label", [labels.SERVICE, labels.COMPONENT])
async def test_labels_and_annotations_that_someone_changes_are_set_right_and_those_of_others_stay(
    world, resource, label
):
    """Neither is a new generation of the object."""
    await ready(world)
    name = {SERVICES: "chat", DEPLOYMENTS: "chat-router", PREFILL_POOLS: "chat-prefill"}[resource]
    before = world.api.one(resource, name)["metadata"]

    def meddle(document):
        del document["metadata"]["labels"][label]
        document["metadata"]["labels"]["theirs"] = "x"
        document["metadata"]["annotations"][labels.SPEC_HASH] = "0"

    def is_mended():
        metadata = world.api.one(resource, name)["metadata"]
        return (
            metadata["annotations"] == before["annotations"] and metadata["labels"].items() >= before["labels"].items()
        )

    world.api.change(world.api.one(resource, name), meddle)
    await world.until(is_mended)
    assert world.api.one(resource, name)["metadata"]["labels"]["theirs"] == "x"


async def test_fields_of_others_stay(world):
    await ready(world)
    account = world.api.one(SERVICES, "chat")
    world.api.change(account, lambda document: document["metadata"]["annotations"].update(theirs="x"))
    world.respec(router={"replicas": 2})
    await world.until(lambda: world.api.one(DEPLOYMENTS, "chat-router")["spec"]["replicas"] == 2)
    await world.settled()
    assert world.api.one(SERVICES, "chat")["metadata"]["annotations"]["theirs"] == "x"


async def test_conditions_of_others_stay_and_times_change_only_with_the_status(world):
    await ready(world)
    foreign = {
        "type": "Theirs", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2020-01-01T00:00:00Z"
    }  # fmt: skip

    def change(document):
        document["status"]["conditions"].append(foreign)
        for each in document["status"]["conditions"]:
            each["lastTransitionTime"] = "2020-01-01T00:00:00Z"

    world.api.change(world.service(), change)
    world.serve_routers(ready=0)
    await world.until(lambda: world.is_condition("Ready", "False"))
    assert foreign in world.service()["status"]["conditions"]
    assert world.condition("Accepted")["lastTransitionTime"] == "2020-01-01T00:00:00Z"
    assert world.condition("RouterReady")["lastTransitionTime"] == "2026-01-01T00:00:00Z"


async def test_a_failed_instance_is_replaced_and_the_status_says_why(world):
    await ready(world)
    failed = world.pods("decode")[0]
    world.fail(failed, "CUDA error: out of memory")
    found = await world.until(
        lambda: [pod for pod in world.pods("decode") if pod["metadata"]["uid"] != failed["metadata"]["uid"]]
    )
    await world.until(lambda: failed["metadata"]["name"] not in [pod["metadata"]["name"] for pod in world.pods()])
    await world.until(lambda: world.is_condition("DecodeReady", "False"))
    world.serve(found[0])
    await world.until(lambda: world.is_condition("Ready", "True"))
    await world.until(lambda: any(event["reason"] == "InstanceFailed" for event in world.events()))


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"model": {"uri": "ftp://x", "name": "a"}}, "InvalidSpec", "model.uri"),
        ({"gpuBudget": 1, "prefill": {"minReplicas": 2}, "decode": {"minReplicas": 2}}, "InvalidSpec", "gpuBudget"),
        ({"prefill": {"minReplicas": 0}, "decode": {"minReplicas": 1}}, "InvalidSpec", "minReplicas"),
        (
            {"decode": {"template": {"spec": {"restartPolicy": "Always"}}}},
            "TemplateRefused", "restartPolicy",
        ),
        ({"nonsense": 1}, "InvalidSpec", "nonsense"),
    ],
)  # fmt: skip
async def test_a_spec_that_cannot_be_carried_out_is_refused_with_the_field_and_makes_nothing(
    world, spec, reason, words
):
    world.api.seed(service(**spec))
    await world.until(lambda: world.is_condition("Accepted", "False", reason))
    assert words in world.condition("Accepted")["message"]
    assert world.condition("Ready")["status"] == "False"
    assert world.service()["status"]["observedGeneration"] == 1
    assert world.names() == ["InferenceService/chat"]
    await world.until(lambda: any(words in event["note"] for event in world.events()))


async def test_a_bad_change_of_a_running_service_leaves_it_running(world):
    await ready(world)
    before = world.names()
    world.respec(model={"uri": "ftp://x", "name": "smollm2"})
    await world.until(lambda: world.is_condition("Accepted", "False"))
    assert world.service()["status"]["observedGeneration"] == 2
    assert "the last accepted spec goes on" in world.condition("Accepted")["message"]
    await world.settled()
    assert world.names() == before
    world.respec(model={"uri": "demo://smollm2-135m", "name": "smollm2"})
    await world.until(lambda: world.is_condition("Ready", "True"))


async def test_a_spec_that_is_too_large_to_be_kept_is_refused(world):
    large = {"metadata": {"annotations": {f"note-{number}": "x" * 4000 for number in range(40)}}}
    world.api.seed(service(prefill={"minReplicas": 1, "maxReplicas": 1, "template": large}))
    await world.until(lambda: world.is_condition("Accepted", "False", "InvalidSpec"))
    assert "131072" in world.condition("Accepted")["message"]


async def test_under_external_scaling_counts_are_read_and_never_written(world):
    await ready(world, scaling="External")
    world.api.calls.clear()
    world.api.change(world.api.one(DECODE_POOLS, "chat-decode"), lambda document: document["spec"].update(replicas=2))
    await world.until(lambda: len(world.pods("decode")) == 2)
    await world.until(lambda: world.service()["status"]["decode"]["desired"] == 2)
    assert world.replicas(DECODE_POOLS) == 2
    assert world.service()["status"]["advised"]["reason"] == "LoadUnknown"
    assert not [call for call in world.api.calls if call[0] == "patch" and "Pool" in call[1]]
    world.api.change(world.api.one(DECODE_POOLS, "chat-decode"), lambda document: document["spec"].update(replicas=9))
    await world.until(lambda: world.is_condition("ScalingLimited", "True", "OutOfBounds"))
    await world.until(lambda: len(world.pods("decode")) == 3)
    assert world.replicas(DECODE_POOLS) == 9


async def test_under_external_scaling_pools_begin_with_their_minimum(world):
    role = {"minReplicas": 2, "maxReplicas": 3, "accelerator": {"count": 0}}
    world.api.seed(service(scaling="External", prefill=role, decode=role))
    await world.until(lambda: all(world.replicas(pool) == 2 for pool in POOLS))
    await world.until(lambda: len(world.pods()) == 4)


async def test_under_slo_scaling_both_counts_are_written_and_what_others_write_is_set_right(world):
    await ready(world)
    world.api.change(world.api.one(DECODE_POOLS, "chat-decode"), lambda document: document["spec"].update(replicas=3))
    await world.until(lambda: world.replicas(DECODE_POOLS) == 1)
    assert len(world.pods("decode")) == 1


async def test_a_paused_service_is_observed_and_nothing_is_done(world):
    await ready(world)
    world.annotate(world.service(), paused="true")
    await world.until(lambda: world.is_condition("Paused", "True"))
    await world.settled()
    world.api.calls.clear()
    world.api.remove(world.api.one(DEPLOYMENTS, "chat-router"))
    world.fail(world.pods("decode")[0], "it broke")
    await world.until(lambda: world.is_condition("DecodeReady", "False"))
    await world.settled()
    assert {verb for verb, _ in world.api.writes} <= {"apply_status", "create"}
    assert all(what.startswith("Event/") for verb, what in world.api.writes if verb == "create")
    world.annotate(world.service(), paused="false")
    await world.until(lambda: world.api.one(DEPLOYMENTS, "chat-router"))
    await world.until(lambda: any(not pod.get("status") for pod in world.pods("decode")))


async def test_the_budget_counts_what_still_ends_after_a_pool_was_deleted_by_hand(world):
    role = {"minReplicas": 1, "maxReplicas": 3, "accelerator": {"count": 1}}
    await ready(world, prefill=role, decode=role, gpuBudget=2)
    pool, pod = world.api.one(DECODE_POOLS, "chat-decode"), world.pods("decode")[0]
    # The collector gives pods their grace; the pool itself is gone at once.
    world.api.objects.pop((DECODE_POOLS, "default", "chat-decode"))
    world.api._tell("DELETED", {**pool, "metadata": {**pool["metadata"], "resourceVersion": "99999"}})
    await world.until(lambda: world.api.one(DECODE_POOLS, "chat-decode"))
    world.api.change(pod, lambda document: document["metadata"].update(deletionTimestamp="2026-01-01T00:00:30Z"))
    await world.settled()
    assert world.pods("decode") == [world.api.one(PODS, pod["metadata"]["name"])]
    world.api.remove(world.api.one(PODS, pod["metadata"]["name"]))
    await world.until(lambda: len(world.pods("decode")) == 1)


async def test_a_deleted_service_takes_all_of_it_along_and_leaves_what_is_not_its_own(world):
    stranger = world.api.seed(
        {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "stranger", "namespace": "default", "labels": {labels.SERVICE: "chat"}},
        }
    )  # fmt: skip
    await ready_beside(world, stranger)
    world.api.remove(world.service())
    await world.until(lambda: len(world.keeper) == 0)
    await world.settled()
    assert world.names() == ["Pod/stranger"]
    assert world.api.one(PODS, "stranger") == stranger


async def ready_beside(world, stranger):
    world.api.seed(service())
    await world.until(lambda: len(world.pods()) == 3)
    assert stranger in world.pods()
    for pod in world.pods():
        if pod["metadata"]["name"] != "stranger":
            world.serve(pod)
    await world.until(lambda: world.is_condition("PrefillReady", "True"))


async def test_a_service_that_is_being_deleted_gets_no_new_objects(world):
    await ready(world)
    world.api.change(
        world.service(), lambda document: document["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z")
    )
    await world.until(lambda: len(world.keeper) == 0)
    world.api.calls.clear()
    world.api.remove(world.api.one(DEPLOYMENTS, "chat-router"))
    await world.settled()
    assert world.api.writes == []


async def test_a_service_made_anew_under_the_same_name_waits_for_the_old_objects_and_gets_its_own_token(world):
    await ready(world)
    before = world.api.one(SECRETS, "chat-fleet-token")
    old = world.service()
    # The collector has not come yet: the service is gone and its objects are there.
    world.api.objects.pop((INFERENCE_SERVICES, "default", "chat"))
    world.api._tell("DELETED", {**old, "metadata": {**old["metadata"], "resourceVersion": "99999"}})
    world.api.seed(service())
    await world.until(lambda: world.is_condition("Degraded", "True", "NameTaken"))
    for document in list(world.api.objects.values()):
        owners = [each["uid"] for each in document["metadata"].get("ownerReferences", ())]
        if old["metadata"]["uid"] in owners:
            world.api.remove(document)
    await world.until(lambda: world.is_condition("Degraded", "False"))
    after = await world.until(lambda: world.api.one(SECRETS, "chat-fleet-token"))
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_a_token_that_is_deleted_with_the_pods_that_have_it_is_made_anew_and_one_in_use_is_not(
    world, monkeypatch
):
    monkeypatch.setattr(runtime, "TOKEN_SECONDS", 0.1)
    await ready(world)
    kept = world.keeper._runtimes["default", "chat"]
    before, fleet = kept._token, kept._fleet
    world.api.remove(world.api.one(SECRETS, "chat-fleet-token"))
    world.queue.add(("default", "chat"))
    await world.settled()
    assert "Secret/chat-fleet-token" not in world.names()
    assert kept._fleet is fleet
    for pod in world.pods():
        world.api.remove(pod)
    await world.until(lambda: world.api.one(SECRETS, "chat-fleet-token"))
    await world.until(lambda: kept._token != before and kept._fleet not in {None, fleet})
    await world.until(lambda: len(world.pods("prefill")) == len(world.pods("decode")) == 1)


async def test_an_object_of_somebody_else_that_has_a_childs_name_is_not_touched(world):
    theirs = world.api.seed(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "default"}, "spec": {"x": 1}}
    )
    world.api.seed(service())
    await world.until(lambda: world.is_condition("Degraded", "True", "NameTaken"))
    assert "Service default/chat" in world.condition("Degraded")["message"]
    assert world.api.one(SERVICES, "chat") == theirs
    world.api.remove(theirs)
    await world.until(lambda: world.is_condition("Degraded", "False"))
    assert world.api.one(SERVICES, "chat")["spec"]["type"] == "ClusterIP"


async def test_each_object_of_a_new_service_is_made_with_one_call(world):
    world.api.seed(service())
    await world.until(lambda: len(world.pods()) == 2)
    made = [what for verb, what in world.api.calls if verb in {"apply", "create"} and not what.startswith("Event/")]
    assert len(made) == len(set(made)) == 12
    assert [call for call in world.api.calls if call[0] == "get"] == []


async def test_an_own_object_that_the_cache_does_not_know_yet_is_kept(world):
    await ready(world)
    live = world.api.one(SERVICES, "chat")
    world.caches.of(SERVICES).remove({**live, "metadata": {**live["metadata"], "resourceVersion": "0"}})
    world.api.calls.clear()
    world.queue.add(("default", "chat"))
    await world.settled()
    assert world.api.calls == [("apply", "Service/chat"), ("get", "Service/chat")]
    assert world.api.one(SERVICES, "chat") == live


async def test_one_object_that_cannot_be_made_keeps_no_other_from_being_made_but_those_that_need_it(world):
    def fail(verb, resource, name):
        return ForbiddenError("exceeded quota") if verb == "apply" and resource is SERVICES else None

    world.api.fail = fail
    world.api.seed(service())
    await world.until(lambda: world.is_condition("Degraded", "True", "ApplyFailed"))
    names = world.names()
    assert {"PrefillPool/chat-prefill", "DecodePool/chat-decode", "PodDisruptionBudget/chat-router"} <= set(names)
    assert "Deployment/chat-router" not in names


async def test_what_the_server_refuses_is_told_and_tried_again(world):
    refusing = [True]

    def fail(verb, resource, name):
        if refusing[0] and resource is DEPLOYMENTS and verb == "apply":
            return ForbiddenError("exceeded quota: compute")
        return None

    world.api.fail = fail
    world.api.seed(service())
    await world.until(lambda: world.is_condition("Degraded", "True", "ApplyFailed"))
    assert "exceeded quota" in world.condition("Degraded")["message"]
    refusing[0] = False
    await world.until(lambda: world.is_condition("Degraded", "False"))


async def test_a_pod_that_the_server_refuses_is_told_as_the_reason_why_a_role_is_not_ready(world):
    def fail(verb, resource, name):
        if resource is PODS and verb == "create":
            return ForbiddenError('violates PodSecurity "restricted"')
        return None

    world.api.fail = fail
    world.api.seed(service())
    await world.until(lambda: world.is_condition("PrefillReady", "False", "InstanceFailing"))
    assert "PodSecurity" in world.condition("PrefillReady")["message"]


@pytest.mark.parametrize("error", [UnreachableError("gone"), ConflictError("changed")])
async def test_errors_that_pass_cost_nothing_but_time(world, error):
    dice = random.Random(7)

    def fail(verb, resource, name):
        return error if verb != "list" and dice.random() < 0.3 else None

    world.api.fail = fail
    world.api.seed(service())
    await world.until(lambda: len(world.pods()) >= 2)
    world.api.fail = lambda verb, resource, name: None
    for pod in world.pods():
        world.serve(pod)
    await world.until(lambda: world.api.one(DEPLOYMENTS, "chat-router"))
    world.serve_routers()
    await world.until(lambda: world.is_condition("Ready", "True"))
    assert len(world.pods()) == 2


async def test_a_changed_spec_changes_what_follows_from_it_and_no_more(world):
    await ready(world)
    world.api.calls.clear()
    world.respec(router={"replicas": 3})
    await world.until(lambda: world.service()["status"]["router"]["desired"] == 3)
    await world.settled()
    # The pool keeps the accepted spec.
    applied = {what for verb, what in world.api.writes if verb == "apply"}
    assert applied == {"Deployment/chat-router", "PrefillPool/chat-prefill"}
    assert world.service()["status"]["observedGeneration"] == 2


async def test_two_services_do_not_mind_each_other(world):
    world.api.seed(service("one"))
    world.api.seed(service("two"))
    await world.until(lambda: len(world.pods()) == 4)
    world.api.remove(world.service("one"))
    await world.until(lambda: len(world.keeper) == 1)
    await world.settled()
    assert {pod["metadata"]["labels"][labels.SERVICE] for pod in world.pods()} == {"two"}
