"""Pools without a service: their pods are those of a service, and what they share goes with the last of them."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from render.engine_helpers import CONFIG as ENGINE
from render.engine_helpers import D, P, arguments, pod, service
from render.service_helpers import NETWORK, TOKEN, of_kind

from kllm_core import labels
from kllm_core.kinds.manifest import check_pool
from kllm_operator.render.engine import engine_revision
from kllm_operator.render.owner import Owner
from kllm_operator.render.standalone import account, half_of, policies, shared_token

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {P: "PrefillPool", D: "DecodePool"}
HEAVY = {
    "minReplicas": 2, "maxReplicas": 4, "engineArgs": {"context-length": 4096},
    "parallelism": {"tensor": 2, "pipeline": 2}, "accelerator": {"count": 4},
    "template": {"spec": {"nodeSelector": {"gpu": "big"}}},
}  # fmt: skip
POOLS = [Owner("kllm.io/v1alpha1", kind, "chat", f"uid-{kind}") for kind in KINDS.values()]


def half(role, name="chat", **spec):
    """The service as seen from its pool of one role."""
    common = service().spec.document()
    shared = {field: common[field] for field in ("model", "objectives", "cache", "transferBackend")}
    document = {"apiVersion": "kllm.io/v1alpha1", "kind": KINDS[role], "metadata": {"name": "x", "namespace": "team"}}
    return half_of(name, check_pool(document | {"spec": {**shared, **spec}}))


@pytest.mark.parametrize("role", [P, D])
def test_a_pod_is_that_of_a_service_but_for_what_the_other_role_is_started_with(role):
    alone = pod(half(role, **HEAVY), pool=role)
    whole = pod(service(prefill=HEAVY, decode=HEAVY), pool=role)
    other = f"--{role.other}-engine-args"

    assert arguments(alone) == {**arguments(whole), other: "{}"}
    assert alone["spec"]["nodeSelector"] == {"gpu": "big"}
    for made in (alone, whole):
        del made["spec"]["containers"][0]["args"], made["metadata"]["labels"][labels.REVISION]
    assert alone == whole


@pytest.mark.parametrize("role", [P, D])
def test_the_other_role_has_nothing_and_nobody_but_others_scales(role):
    spec = half(role, **HEAVY).spec

    assert (spec.role(role).min_replicas, spec.role(role).max_replicas) == (2, 4)
    assert (spec.role(role.other).max_replicas, spec.role(role.other).slots) == (0, 0)
    assert spec.scaling.value == "External"


def test_the_revision_follows_the_spec_and_not_the_counts():
    counted = engine_revision(half(P, **{**HEAVY, "maxReplicas": 9}), ENGINE, P)

    assert counted == engine_revision(half(P, **HEAVY), ENGINE, P)
    assert counted != engine_revision(half(P, **{**HEAVY, "engineArgs": {"context-length": 8192}}), ENGINE, P)


def test_the_account_is_owned_by_all_pools_and_controlled_by_none_whatever_their_order():
    made = account(half(P), POOLS)

    kubernetes_validate.validate(made, "1.34", strict=True)
    assert {each["uid"] for each in made["metadata"]["ownerReferences"]} == {each.uid for each in POOLS}
    assert not any(each.get("controller") for each in made["metadata"]["ownerReferences"])
    assert made == account(half(P), POOLS[::-1])
    assert made["metadata"]["annotations"] != account(half(P), POOLS[:1])["metadata"]["annotations"]
    assert made["metadata"]["name"] == pod(half(P))["spec"]["serviceAccountName"]


def test_token_and_policy_are_the_same_from_either_pool_and_belong_to_the_account():
    """No more rights are needed than to make them: nothing waits in the foreground for the account."""
    for make in (
        lambda served: [shared_token(served, uid="uid-a", token=TOKEN)],
        lambda served: policies(served, NETWORK, uid="uid-a"),
    ):
        (made,) = make(half(P))
        assert [made] == make(half(D))
        kubernetes_validate.validate(made, "1.34", strict=True)
        (owner,) = made["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "v1", "kind": "ServiceAccount", "name": "chat-engine", "uid": "uid-a", "controller": True
        }  # fmt: skip
    assert policies(half(P), None, uid="uid-a") == []


def test_engines_let_in_whom_those_of_a_service_let_in():
    (made,) = policies(half(P), NETWORK, uid="uid-a")

    engines = next(each for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "chat-engine")
    assert made["spec"] == engines["spec"]


def test_the_example_of_a_router_is_one_that_the_engines_of_the_example_pools_let_in():
    """Its labels, its service, the secret and the model are those of the pools."""
    pools = [yaml.safe_load((EXAMPLES / f"{kind.lower()}.yaml").read_text()) for kind in KINDS.values()]
    served = half_of("pair", check_pool(pools[0]))
    deployment = list(yaml.safe_load_all((EXAMPLES / "router.yaml").read_text()))[-1]
    template = deployment["spec"]["template"]
    words = template["spec"]["containers"][0]["args"]
    (policy,) = policies(served, NETWORK, uid="uid-a")
    (peer,) = policy["spec"]["ingress"][0]["from"]

    assert {each["metadata"]["name"] for each in pools} == {"pair"}
    assert peer["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert shared_token(served, uid="", token="")["metadata"]["name"] == "pair-fleet-token"
    assert template["spec"]["volumes"][-1]["secret"]["secretName"] == "pair-fleet-token"
    assert {f"--service={served.name}", f"--model-name={served.spec.model.name}", "--page-size=16"} <= set(words)
