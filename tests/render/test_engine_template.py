"""Pod templates over an instance's pod: what they may change, and that what they may not is refused by its name."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render.engine_helpers import CONFIG, P, arguments, engine, named, pod, service

from kllm_operator.render.engine import check_templates
from kllm_operator.render.engine_template import Reserved, TemplateError, merged


def templated(spec=None, *, metadata=None, uri="demo://smollm2-135m"):
    """A service whose prefill pods have a template."""
    template = {"spec": spec or {}} | ({"metadata": metadata} if metadata else {})
    return service(uri, prefill={"template": template})


def operator_wide(template):
    return replace(CONFIG, template=template)


def test_lists_of_named_objects_are_merged_by_name_and_others_replaced():
    spec = {
        "containers": [
            {"name": "engine", "env": [{"name": "HF_HUB_OFFLINE", "value": "0"}],
             "volumeMounts": [{"name": "jit", "mountPath": "/jit"}], "resources": {"limits": {"memory": "64Gi"}}},
            {"name": "exporter", "image": "example.test/exporter:1"},
        ],
        "volumes": [{"name": "jit", "persistentVolumeClaim": {"claimName": "jit"}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "gpu"},
    }  # fmt: skip
    made, plain = pod(templated(spec)), pod()
    container = engine(made)
    assert [each["name"] for each in container["env"]] == ["POD_NAME", "POD_IP", "SGLANG_HOST_IP", "HF_HUB_OFFLINE"]
    assert container["volumeMounts"] == [*engine(plain)["volumeMounts"], {"name": "jit", "mountPath": "/jit"}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "64Gi"}
    assert arguments(made) == arguments(plain)
    assert [each["name"] for each in made["spec"]["containers"]] == ["engine", "exporter"]
    assert named(made["spec"]["volumes"], "jit") == spec["volumes"][0]
    assert made["spec"]["tolerations"] == spec["tolerations"]
    assert made["spec"]["nodeSelector"] == {"pool": "gpu"}


def test_a_volume_is_replaced_as_a_whole_since_it_has_one_source():
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "cache"}}
    assert named(pod(templated({"volumes": [claim]}))["spec"]["volumes"], "models") == claim


def test_the_services_template_goes_over_the_operators():
    config = operator_wide(
        {
            "metadata": {"labels": {"team": "a", "tier": "x"}},
            "spec": {"priorityClassName": "low", "nodeSelector": {"a": "1"}},
        }
    )
    served = templated({"priorityClassName": "high", "nodeSelector": {"b": "2"}}, metadata={"labels": {"team": "b"}})
    made = pod(served, config)
    assert made["spec"]["priorityClassName"] == "high"
    assert made["spec"]["nodeSelector"] == {"a": "1", "b": "2"}
    assert {"team": "b", "tier": "x", "kllm.io/role": "prefill"}.items() <= made["metadata"]["labels"].items()


def test_a_name_in_a_free_map_is_no_list():
    assert pod(templated({"nodeSelector": {"env": "prod"}}))["spec"]["nodeSelector"] == {"env": "prod"}


def test_null_takes_a_default_away():
    assert (
        "fsGroup"
        not in pod(config=operator_wide({"spec": {"securityContext": {"fsGroup": None}}}))["spec"]["securityContext"]
    )


def test_environment_for_fetching_the_model_is_left_out_where_nothing_is_fetched():
    config = operator_wide(
        {"spec": {"initContainers": [{"name": "model", "env": [{"name": "HF_ENDPOINT", "value": "x"}]}]}}
    )
    fetched = named(pod(config=config)["spec"]["initContainers"], "model")
    assert fetched["env"] == [{"name": "HF_ENDPOINT", "value": "x"}]
    assert "initContainers" not in pod(service("pvc://weights"), config)["spec"]


ENGINE = "spec.containers[engine]"
REFUSED = {
    "restartPolicy": ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
    "grace": ({"spec": {"terminationGracePeriodSeconds": 1}}, "spec.terminationGracePeriodSeconds"),
    "command": ({"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}}, f"{ENGINE}.command"),
    "args": ({"spec": {"containers": [{"name": "engine", "args": None}]}}, f"{ENGINE}.args"),
    "ports": ({"spec": {"containers": [{"name": "engine", "ports": []}]}}, f"{ENGINE}.ports"),
    "model": (
        {"spec": {"initContainers": [{"name": "model", "args": ["x"]}]}}, "spec.initContainers[model].args",
    ),
    "environment": (
        {"spec": {"containers": [{"name": "engine", "env": [{"name": "POD_IP", "value": "::"}]}]}},
        f"{ENGINE}.env[POD_IP]",
    ),
    "accelerator": (
        {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}},
        f"{ENGINE}.resources.limits[nvidia.com/gpu]",
    ),
    "token": ({"spec": {"volumes": [{"name": "fleet-token", "emptyDir": {}}]}}, "spec.volumes[fleet-token]"),
    "mount": (
        {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "x", "mountPath": "/run/kllm/"}]}]}},
        f"{ENGINE}.volumeMounts[/run/kllm/]",
    ),
    "wrong list": ({"spec": {"initContainers": [{"name": "engine"}]}}, "spec.initContainers[engine]"),
    "label": ({"metadata": {"labels": {"kllm.io/role": "slot"}}}, "metadata.labels[kllm.io/role]"),
    "label of no text": ({"metadata": {"labels": {"a": 1}}}, "metadata.labels[a]"),
    "name": ({"metadata": {"name": "x"}}, "metadata.name"),
    "unknown": ({"status": {}}, "status"),
    "no list": ({"spec": {"containers": {"name": "engine"}}}, "spec.containers"),
    "taken away": ({"spec": {"containers": [{"name": "engine", "volumeMounts": None}]}},
                   f"{ENGINE}.volumeMounts"),
    "environment taken away": ({"spec": {"containers": [{"name": "engine", "env": None}]}}, f"{ENGINE}.env"),
    "no name": ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0].name"),
    "twice": ({"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}}, "spec.volumes[1].name"),
    "directive": ({"spec": {"$patch": "replace"}}, "spec.$patch"),
    "no mapping": ({"spec": []}, "spec"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_template_may_not_touch_is_refused_by_its_name(template, field):
    with pytest.raises(TemplateError) as refused:
        check_templates(service(), operator_wide(template))
    assert refused.value.field == f"engine.template.{field}"
    assert refused.value.message


def test_an_error_in_a_service_names_the_service_and_the_way_out():
    with pytest.raises(TemplateError, match=r"^spec\.decode\.template\..*\[nvidia.com/gpu\]: set accelerator\.count"):
        check_templates(
            service(decode={"template": {"spec": {"containers": [
                {"name": "engine", "resources": {"requests": {"nvidia.com/gpu": 2}}}
            ]}}}),
            CONFIG,
        )  # fmt: skip


names = st.sampled_from(["a", "b", "c", "engine"])
items = st.lists(
    st.fixed_dictionaries({"name": names}, optional={"x": st.integers(0, 3), "y": st.none() | st.booleans()}),
    max_size=4, unique_by=lambda item: item["name"],
)  # fmt: skip
specs = st.fixed_dictionaries(
    {}, optional={"containers": items, "volumes": items, "tolerations": st.lists(st.integers(), max_size=3),
                  "nodeSelector": st.dictionaries(names, st.none() | st.text(max_size=2), max_size=3)},
)  # fmt: skip


@given(specs, specs)
def test_a_merge_keeps_every_name_of_both_and_says_what_the_template_says(base, patch):
    pod_, template = {"metadata": {}, "spec": base}, {"spec": patch}
    before = copy.deepcopy((pod_, template))
    result = merged(pod_, template, where="t", reserved=Reserved())["spec"]
    assert (pod_, template) == before
    for kind in ("containers", "volumes"):
        both = [each["name"] for each in (*base.get(kind, ()), *patch.get(kind, ()))]
        assert [each["name"] for each in result.get(kind, ())] == list(dict.fromkeys(both))
        for item in patch.get(kind, ()):
            for name, value in item.items():
                assert named(result[kind], item["name"]).get(name) == value
    assert result.get("tolerations") == patch.get("tolerations", base.get("tolerations"))
    for name, value in (patch.get("nodeSelector") or {}).items():
        assert result["nodeSelector"].get(name) == value
    assert merged({"metadata": {}, "spec": result}, template, where="t", reserved=Reserved())["spec"] == result


def test_pods_are_made_of_valid_templates_only():
    assert pod(templated({"hostNetwork": True}), pool=P)["spec"]["hostNetwork"] is True
