"""What the operator relies on in an API server: run on the one in memory here, and on a real one in e2e.

Whoever runs it has fixtures `api`, a KubeApi, and `namespace`, which is empty.
"""

from __future__ import annotations

import pytest

from kllm_core.labels import MANAGED_BY, MANAGER
from kllm_operator.kube.exceptions import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from kllm_operator.kube.resources import SERVICES

CONDITION = {"reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}


def service(namespace, name="a", *, labels=None, **metadata):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {MANAGED_BY: MANAGER}, **metadata},
        "spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 80}], "selector": {"a": "b"}},
    }


async def test_an_apply_makes_an_object_and_the_same_again_changes_nothing(api, namespace):
    made = await api.apply(service(namespace))
    assert made["metadata"]["uid"]
    again = await api.apply(service(namespace))
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_versions_grow_with_each_change(api, namespace):
    versions = [await api.apply(service(namespace, annotations={"n": str(number)})) for number in range(3)]
    numbers = [int(each["metadata"]["resourceVersion"]) for each in versions]
    assert numbers == sorted(set(numbers))


async def test_an_apply_takes_away_what_it_wrote_before_and_keeps_what_others_wrote(api, namespace):
    await api.apply(service(namespace, annotations={"ours": "1", "both": "1"}))
    await api.patch(SERVICES, namespace=namespace, name="a", body={"metadata": {"annotations": {"theirs": "1"}}})
    after = await api.apply(service(namespace, annotations={"both": "2"}))
    assert after["metadata"]["annotations"] == {"both": "2", "theirs": "1"}


async def test_an_apply_wins_over_others(api, namespace):
    await api.apply(service(namespace))
    await api.patch(SERVICES, namespace=namespace, name="a", body={"spec": {"selector": {"a": "theirs"}}})
    assert (await api.apply(service(namespace)))["spec"]["selector"] == {"a": "b"}


async def test_an_apply_for_another_uid_is_refused(api, namespace):
    await api.apply(service(namespace))
    with pytest.raises(ConflictError):
        await api.apply(service(namespace, uid="00000000-0000-0000-0000-000000000000"))


async def test_an_apply_with_a_version_that_nothing_has_makes_an_object_and_changes_none(api, namespace):
    metadata = service(namespace)["metadata"] | {"resourceVersion": "1"}
    made = await api.apply(service(namespace) | {"metadata": metadata})
    assert made["metadata"]["resourceVersion"] != "1"
    with pytest.raises(ConflictError):
        await api.apply(service(namespace, annotations={"a": "1"}) | {"metadata": metadata})
    assert (await api.get(SERVICES, namespace=namespace, name="a"))["metadata"]["uid"] == made["metadata"]["uid"]
    # What it made can be taken away by an ordinary apply.
    await api.apply(service(namespace, annotations={"a": "1"}))
    assert "annotations" not in (await api.apply(service(namespace)))["metadata"]


async def test_conditions_are_merged_by_type_and_a_status_write_leaves_the_spec(api, namespace):
    made = await api.apply(service(namespace))

    async def tell(*types):
        conditions = [{"type": each, "status": "True", **CONDITION} for each in types]
        metadata = {key: made["metadata"][key] for key in ("name", "namespace", "uid")}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "status": {"conditions": conditions}}
        return await api.apply_status(body)

    await tell("One", "Two")
    after = await tell("Two", "Three")
    assert sorted(each["type"] for each in after["status"]["conditions"]) == ["Three", "Two"]
    assert after["spec"]["selector"] == {"a": "b"}


async def test_a_status_of_what_is_not_there_is_refused(api, namespace):
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "no", "namespace": namespace}, "status": {}}
    # A real server says NotFound, Invalid or Conflict, as the kind's rules and the uid will have it.
    with pytest.raises(KubeError):
        await api.apply_status(body)
    with pytest.raises(NotFoundError):
        await api.get(SERVICES, namespace=namespace, name="no")


async def test_a_name_is_taken_once(api, namespace):
    await api.create(service(namespace))
    with pytest.raises(AlreadyExistsError):
        await api.create(service(namespace))


@pytest.mark.parametrize("field", ["uid", "resourceVersion"])
async def test_a_patch_with_a_precondition_that_does_not_hold_is_a_conflict(api, namespace, field):
    made = await api.apply(service(namespace))
    await api.patch(SERVICES, namespace=namespace, name="a", body={"metadata": {"labels": {"x": "1"}}})
    stale = {"uid": "00000000-0000-0000-0000-000000000000", "resourceVersion": made["metadata"]["resourceVersion"]}
    body = {"metadata": {field: stale[field], "labels": {"x": "2"}}}
    with pytest.raises(ConflictError):
        await api.patch(SERVICES, namespace=namespace, name="a", body=body)
    assert (await api.get(SERVICES, namespace=namespace, name="a"))["metadata"]["labels"]["x"] == "1"


async def test_a_patch_with_null_takes_a_field_away(api, namespace):
    await api.apply(service(namespace, annotations={"x": "1", "y": "1"}))
    body = {"metadata": {"annotations": {"x": None}}}
    after = await api.patch(SERVICES, namespace=namespace, name="a", body=body)
    assert after["metadata"]["annotations"] == {"y": "1"}


async def test_a_delete_hits_the_object_of_that_uid_only_and_may_be_repeated(api, namespace):
    made = await api.apply(service(namespace))
    await api.delete(SERVICES, namespace=namespace, name="a", uid="00000000-0000-0000-0000-000000000000")
    assert await api.get(SERVICES, namespace=namespace, name="a")
    for _ in range(2):
        await api.delete(SERVICES, namespace=namespace, name="a", uid=made["metadata"]["uid"])
    with pytest.raises(NotFoundError):
        await api.get(SERVICES, namespace=namespace, name="a")


async def test_a_list_is_narrowed_by_labels_and_can_leave_everything_but_metadata_out(api, namespace):
    for name, labels in (("a", {"k": "1"}), ("b", {"k": "2"}), ("c", {"k": "1", "more": "1"})):
        await api.apply(service(namespace, name, labels=labels))
    listed = await api.list(SERVICES, namespace=namespace, labels="k=1", metadata_only=True)
    assert sorted(each["metadata"]["name"] for each in listed) == ["a", "c"]
    assert all(each["metadata"]["uid"] and "spec" not in each for each in listed)
    assert {(each["apiVersion"], each["kind"]) for each in listed} == {("v1", "Service")}
    assert len(await api.list(SERVICES, namespace=namespace)) == 3
