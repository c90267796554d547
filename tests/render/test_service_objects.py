"""What belongs to a service: names, labels, owners, order, and that a change shows."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from render.engine_helpers import service
from render.service_helpers import CONFIG, TOKEN, UID, URIS, documents, of_kind

from kllm_core import labels
from kllm_core.kinds.manifest import ManifestError, check_pool, check_service
from kllm_operator.kube.resources import CHILDREN, resource_of
from kllm_operator.render.accepted import recalled
from kllm_operator.render.permissions import OPERATOR, ROUTER
from kllm_operator.render.service import children, fleet_token

LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


def named(name, namespace="team"):
    document = service().document()
    return check_service({**document, "metadata": {"name": name, "namespace": namespace}})


@pytest.mark.parametrize("version", ["1.29", "1.34", "1.37"])
@pytest.mark.parametrize("uri", URIS)
def test_all_of_it_is_valid_in_every_supported_kubernetes(uri, version):
    for document in documents(service(uri)):
        if not document["apiVersion"].startswith(labels.GROUP):
            kubernetes_validate.validate(document, version, strict=True)


def test_pools_are_valid_by_their_own_kind_and_leave_their_counts_to_others():
    pools = [*of_kind("PrefillPool"), *of_kind("DecodePool")]

    assert [pool["metadata"]["name"] for pool in pools] == ["chat-prefill", "chat-decode"]
    for pool in pools:
        check_pool(pool)
        assert "replicas" not in pool["spec"]


def test_what_pods_need_comes_before_what_makes_pods():
    kinds = [each["kind"] for each in children(service(), uid=UID, config=CONFIG)]

    assert kinds[-1] == "Deployment"
    assert kinds.index("ServiceAccount") < kinds.index("Role") < kinds.index("RoleBinding") < kinds.index("PrefillPool")
    assert kinds.index("NetworkPolicy") < kinds.index("Service")


def test_every_kind_of_child_is_watched_by_the_operator():
    for document in children(service(), uid=UID, config=CONFIG):
        assert resource_of(document) in CHILDREN


@given(name=NAMES)
def test_names_and_labels_are_what_kubernetes_takes(name):
    for document in documents(named(name)):
        metadata = document["metadata"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", metadata["name"])
        assert len(metadata["name"]) <= 63
        for value in metadata["labels"].values():
            assert len(value) <= 63
            assert LABEL.fullmatch(value)


def test_everything_goes_with_the_service_and_with_no_other_of_its_name():
    for document in documents(uid="first"):
        (owner,) = document["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "kllm.io/v1alpha1",
            "kind": "InferenceService",
            "name": "chat",
            "uid": "first",
            "controller": True,
            "blockOwnerDeletion": True,
        }
        assert document["metadata"]["namespace"] == "team"


@given(first=NAMES, second=NAMES)
def test_selectors_match_pods_of_the_own_service_and_of_no_other(first, second):
    pods = {
        (name, component): {labels.NAME: "kllm", labels.COMPONENT: component, labels.SERVICE: name}
        for name in (first, second)
        for component in (labels.COMPONENT_ENGINE, labels.COMPONENT_ROUTER)
    }
    for document in documents(named(first)):
        spec = document.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if document["kind"] not in {"NetworkPolicy", "PodDisruptionBudget", "Deployment", "Service"}:
            continue
        wanted = selector.get("matchLabels", selector)
        component = document["metadata"]["labels"][labels.COMPONENT]
        matched = {key for key, has in pods.items() if wanted.items() <= has.items()}
        assert matched == {(first, component)}


def test_the_hash_changes_with_the_content_and_only_then():
    def hashes(served, config=CONFIG):
        return {
            (each["kind"], each["metadata"]["name"]): each["metadata"]["annotations"][labels.SPEC_HASH]
            for each in documents(served, config)
        }

    before = hashes(service())
    changed = {key for key, value in hashes(service(router={"replicas": 2})).items() if before[key] != value}

    assert hashes(service()) == before
    # The pool keeps the accepted spec.
    assert changed == {("Deployment", "chat-router"), ("PrefillPool", "chat-prefill")}
    assert hashes(service(), replace(CONFIG, router=replace(CONFIG.router, image="other:2"))) != before
    assert all(re.fullmatch("[0-9a-f]{10}", value) for value in before.values())


def test_the_spec_that_the_pool_keeps_is_the_whole_of_it_again():
    template = {"spec": {"tolerations": [{"operator": "Exists"}]}}
    served = service(router={"replicas": 2, "template": template}, gpuBudget=7, scaling="External")
    pool = next(each for each in documents(served) if each["kind"] == "PrefillPool")
    refused = {**service().document(), "spec": {"nonsense": 1}}

    assert recalled(pool, refused) == served
    assert recalled({"metadata": {}}, refused) is None
    for text in ("{", '{"nonsense": 1}'):
        pool["metadata"]["annotations"][labels.ACCEPTED_SPEC] = text
        with pytest.raises(ManifestError, match=labels.ACCEPTED_SPEC):
            recalled(pool, refused)


def test_rendering_changes_nothing_that_it_was_given():
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [{"operator": "Exists"}]}}
    config = replace(CONFIG, router=replace(CONFIG.router, template=template))
    before = json.dumps(template)

    assert documents(config=config) == documents(config=config)
    assert json.dumps(template) == before


def test_the_token_is_kept_as_it_was_given_and_cannot_be_changed_in_place():
    secret = fleet_token(service(), uid=UID, token=TOKEN)

    assert base64.b64decode(secret["data"]["token"]).decode() == TOKEN
    assert secret["immutable"] is True
    assert secret["metadata"]["name"] == "chat-fleet-token"


def test_accounts_hand_out_no_token_by_themselves():
    assert {each["metadata"]["name"] for each in of_kind("ServiceAccount")} == {"chat-engine", "chat-router"}
    assert all(each["automountServiceAccountToken"] is False for each in of_kind("ServiceAccount"))


def test_a_router_may_read_pods_of_its_namespace_and_nothing_else():
    (role,), (binding,) = of_kind("Role"), of_kind("RoleBinding")

    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "chat-router", "namespace": "team"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_the_operator_may_do_all_that_it_grants_to_routers():
    held = {grant for rule in OPERATOR for grant in rule.grants()}

    assert {grant for rule in ROUTER for grant in rule.grants()} <= held


def test_the_operator_never_lists_secrets_and_uses_no_wildcard():
    held = {grant for rule in OPERATOR for grant in rule.grants()}

    assert not any("*" in part for grant in held for part in grant)
    assert {verb for _, resource, verb in held if resource == "secrets"} == {"get", "create"}
