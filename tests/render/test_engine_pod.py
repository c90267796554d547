"""The pod of an instance: what the agent is told, what it may do, and what its revision stands for."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from render.engine_helpers import CONFIG, OWNER, D, P, arguments, engine, named, pod, service

from kllm_operator.render.engine import engine_revision

GOLDEN = Path(__file__).with_name("golden")
GPUS = {"accelerator": {"count": 2}, "parallelism": {"tensor": 2}}


@pytest.mark.parametrize(
    ("file", "served", "slot"),
    [
        ("engine_demo", service(), False),
        ("engine_claim_slot", service("pvc://weights/llama", prefill=GPUS, decode=GPUS), True),
    ],
)
def test_pods_are_as_they_were_reviewed(file, served, slot):
    assert pod(served, slot=slot) == yaml.safe_load((GOLDEN / f"{file}.yaml").read_text())


def test_one_of_each_kind_differs_in_role_only():
    made = [pod(pool=P), pod(pool=D), pod(pool=P, slot=True)]
    assert [arguments(each).get("--role") for each in made] == ["prefill", "decode", None]
    assert ["--slot" in arguments(each) for each in made] == [False, False, True]
    assert [each["metadata"]["labels"]["kllm.io/role"] for each in made] == ["prefill", "decode", "slot"]
    for each in made:
        each["metadata"]["labels"].pop("kllm.io/role")
        engine(each)["args"] = [word for word in engine(each)["args"] if word not in {"--role", "--slot", P, D}]
    assert made[0] == made[1] == made[2]


def test_it_belongs_to_its_pool_and_is_found_by_its_labels():
    metadata = pod()["metadata"]
    assert metadata["ownerReferences"] == [OWNER.reference()]
    assert OWNER.reference()["controller"] is True
    assert metadata["namespace"] == "team"
    assert {"kllm.io/service": "chat", "app.kubernetes.io/component": "engine"}.items() <= metadata["labels"].items()


def test_both_roles_arguments_are_in_every_pod_so_that_it_may_become_either():
    served = service(
        prefill={
            "engineArgs": {"chunked-prefill-size": 4096},
            "parallelism": {"tensor": 4, "context": 2},
            "accelerator": {"count": 4},
        },
        decode={
            "engineArgs": {"disable-overlap-schedule": True},
            "parallelism": {"tensor": 4, "data": 2},
            "accelerator": {"count": 4},
        },
    )
    given_ = arguments(pod(served, pool=D))
    assert json.loads(given_["--prefill-engine-args"]) == {
        "tp-size": 4, "attn-cp-size": 2, "chunked-prefill-size": 4096,
    }  # fmt: skip
    assert json.loads(given_["--decode-engine-args"]) == {
        "tp-size": 4, "dp-size": 2, "enable-dp-attention": True, "disable-overlap-schedule": True,
    }  # fmt: skip


def test_accelerators_are_asked_for_by_their_resource_and_the_cpu_asks_for_none():
    npu = {"accelerator": {"resourceName": "example.com/npu", "count": 3}}
    asked = engine(pod(service(prefill=npu)))["resources"]
    assert asked == {"limits": {"example.com/npu": 3}, "requests": {"example.com/npu": 3}}
    assert engine(pod(service(prefill={"accelerator": {"count": 0}})))["resources"] == {}


@pytest.mark.parametrize(
    ("uri", "at", "volume", "fetched"),
    [
        ("hf://org/name@main", "/var/lib/kllm/work/model", {"name": "models", "emptyDir": {}}, True),
        ("demo://smollm2-135m", "/var/lib/kllm/work/model", {"name": "models", "emptyDir": {}}, True),
        ("pvc://weights", "/var/lib/kllm/model",
         {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}, False),
        ("pvc://weights/a/b/", "/var/lib/kllm/model/a/b",
         {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}, False),
        ("/srv/models/llama", "/var/lib/kllm/model",
         {"name": "model", "hostPath": {"path": "/srv/models/llama", "type": "Directory"}}, False),
    ],
)  # fmt: skip
def test_the_model_comes_from_where_its_address_says(uri, at, volume, fetched):
    made = pod(service(uri))
    assert arguments(made)["--model"] == at
    assert volume in made["spec"]["volumes"]
    mounted = named(engine(made)["volumeMounts"], volume["name"])
    assert mounted.get("readOnly", False) is not fetched
    assert [each["name"] for each in made["spec"].get("initContainers", ())] == (["model"] if fetched else [])
    if fetched:
        told = named(made["spec"]["initContainers"], "model")["args"]
        assert told[:2] == ["model", uri]
        assert told[told.index("--link") + 1] == at


def test_every_container_may_do_next_to_nothing():
    spec = pod()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip


def test_what_drains_has_its_time_before_it_is_killed():
    made = pod(config=replace(CONFIG, drain_seconds=12.5))
    assert arguments(made)["--drain-seconds"] == "12.5"
    assert made["spec"]["terminationGracePeriodSeconds"] == 28


def test_the_operators_settings_reach_the_pod():
    config = replace(
        CONFIG, command=("/opt/engine", "-v"), pull_policy="Always", pull_secrets=("a", "b"), pace="decode=0.1"
    )
    made = pod(config=config)
    for container in (*made["spec"]["containers"], *made["spec"]["initContainers"]):
        assert container["command"] == ["/opt/engine", "-v"]
        assert container["imagePullPolicy"] == "Always"
    assert made["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert arguments(made)["--pace"] == "decode=0.1"


def test_probes_ask_the_agent_and_never_the_engine():
    container = engine(pod())
    assert container["livenessProbe"]["grpc"] == {"port": 7300, "service": "liveness"}
    assert container["readinessProbe"]["grpc"] == {"port": 7300, "service": "readiness"}
    assert container["startupProbe"]["grpc"] == {"port": 7300, "service": "liveness"}


CHANGES = {
    "model": {"uri": "demo://tiny-random-llama"},
    "prefill engineArgs": {"prefill": {"engineArgs": {"chunked-prefill-size": 1}}},
    "decode engineArgs": {"decode": {"engineArgs": {"chunked-prefill-size": 1}}},
    "page size": {"cache": {"pageSize": 32}},
    "template": {
        role: {"template": {"spec": {"priorityClassName": "high"}}} for role in ("prefill", "decode")
    },
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_pod_changes_its_revision_in_both_roles(change):
    changed = service(**change)
    for role in (P, D):
        assert engine_revision(changed, CONFIG, role) != engine_revision(service(), CONFIG, role)
        assert pod(changed, pool=role)["metadata"]["labels"]["kllm.io/revision"] == engine_revision(
            changed, CONFIG, role
        )


@pytest.mark.parametrize(
    "change",
    [{"prefill": {"minReplicas": 2, "maxReplicas": 9, "slots": 3}}, {"gpuBudget": 40}, {"router": {"replicas": 3}},
     {"objectives": {"ttftMilliseconds": 5, "tpotMilliseconds": 5}}],
)  # fmt: skip
def test_what_leaves_the_pod_as_it_is_leaves_its_revision(change):
    assert engine_revision(service(**change), CONFIG, P) == engine_revision(service(), CONFIG, P)


def test_roles_on_other_accelerators_or_templates_are_other_revisions():
    for own in ({"accelerator": {"count": 8}}, {"template": {"spec": {"nodeSelector": {"gpu": "large"}}}}):
        served = service(prefill=own)
        assert engine_revision(served, CONFIG, P) != engine_revision(served, CONFIG, D)
    assert engine_revision(service(), CONFIG, P) == engine_revision(service(), CONFIG, D)


values = st.booleans() | st.integers(0, 9) | st.text("ab", max_size=3)


@given(st.dictionaries(st.sampled_from(["tp-like", "a", "b-c", "z9"]), values), st.randoms(use_true_random=False))
def test_the_order_of_a_manifest_is_no_revision(engine_args, rng):
    shuffled = list(engine_args.items())
    rng.shuffle(shuffled)
    one = service(prefill={"engineArgs": engine_args}, decode={"engineArgs": engine_args})
    other = service(prefill={"engineArgs": dict(shuffled)}, decode={"engineArgs": dict(shuffled)})
    assert engine_revision(one, CONFIG, P) == engine_revision(other, CONFIG, P)


def test_rendering_changes_nothing_that_it_was_given():
    template = {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]}}
    config = replace(CONFIG, template=copy.deepcopy(template))
    first = pod(config=config)
    assert pod(config=config) == first
    assert config.template == template
