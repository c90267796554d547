"""Manifests: what is taken, and how a wrong one is refused."""

from pathlib import Path

import pytest
import yaml

from kllm_core.kinds.manifest import (
    MAXIMUM_BYTES,
    ManifestError,
    check_pool,
    check_service,
    parse_service,
    read_service,
)
from kllm_core.kinds.model import ModelSource
from kllm_core.kinds.status import ServiceStatus
from kllm_core.objectives import Binding, Objectives

EXAMPLES = Path(__file__).parents[2] / "examples"


def manifest(**spec):
    base = {
        "model": {"uri": "demo://smollm2-135m", "name": "smollm2"},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
    }
    return {
        "apiVersion": "kllm.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": base | spec,
    }


def problems_of(document):
    with pytest.raises(ManifestError) as caught:
        parse_service(yaml.safe_dump(document))
    return caught.value.problems


def test_the_example_is_valid_and_binds_late_by_default():
    service = read_service(EXAMPLES / "inferenceservice.yaml")

    assert service.name == "chat"
    assert service.spec.router.binding is Binding.LATE
    assert service.spec.objectives.objectives() == Objectives(1.0, 0.15, 90)
    assert (service.spec.prefill.min_replicas, service.spec.decode.max_replicas) == (1, 2)


def test_what_kubernetes_adds_to_metadata_is_ignored():
    document = manifest()
    document["metadata"] |= {"uid": "1", "managedFields": []}

    assert parse_service(yaml.safe_dump(document)).metadata.namespace == "default"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"objectivs": {}}, "spec.objectivs: unknown field; did you mean 'objectives'?"),
        ({"prefill": {"minReplica": 1}}, "spec.prefill.minReplica: unknown field; did you mean 'minReplicas'?"),
        (
            {"cache": {"hostGibibytes": 1}},
            "spec.cache.hostGibibytes: cache.hostGibibytes must be 0: no instance keeps KV"
            " in host memory yet; leave it out",
        ),
        ({"cache": {"zzz": 1}}, "spec.cache.zzz: unknown field; valid fields are hostGibibytes, kvType, pageSize"),
        (
            {"router": {"binding": "late"}},
            "spec.router.binding: expected 'Late', 'Early' or 'JustInTime', got 'late'; did you mean 'Late'?",
        ),
        ({"prefill": {"minReplicas": 3, "maxReplicas": 2}}, "spec.prefill: minReplicas must not be above maxReplicas"),
        ({"prefill": {"engineArgs": {"port": 1}}}, "spec.prefill.engineArgs: engineArgs must not set 'port'"),
        ({"prefill": {"engineArgs": {"--x": 1}}}, "without its leading dashes"),
        (
            {"model": {"uri": "s3://x", "name": "m"}},
            "spec.model.uri: a model is hf://ORG/NAME[@REVISION], pvc://CLAIM[/PATH], demo://NAME or",
        ),
        ({"model": {"uri": "demo://x", "name": "m"}}, "there are smollm2-135m, tiny-random-llama"),
        ({"model": {"uri": "hf://x", "name": "m"}}, "hf://ORG/NAME"),
        ({"model": {"uri": "/models/x"}}, "spec.model.name: required field is missing"),
        ({"decode": {"minReplicas": 0}}, "must both be 0 or both be above 0"),
        (
            {"decode": {"parallelism": {"context": 2, "tensor": 2}, "accelerator": {"count": 2}}},
            "spec.decode: parallelism.context must be 1",
        ),
        ({"gpuBudget": 1}, "spec: gpuBudget must be at least minReplicas times accelerator.count"),
        ({"prefill": {"engineArgs": {"x": [1]}}}, "spec.prefill.engineArgs.x: must be text, a number, true or false"),
        ({"prefill": {"template": {"spek": {}}}}, "spec.prefill.template.spek: unknown field; did you mean 'spec'?"),
        (
            {"prefill": {"template": {"spec": {"containers": [{"name": "engine", "args": []}]}}}},
            "spec.prefill.template.spec.containers.0: command, args and ports of the containers engine",
        ),
        ({"prefill": {"minReplicas": "many"}}, "spec.prefill.minReplicas: input should be a valid integer"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path_and_the_fix(spec, problem):
    assert any(problem in text for text in problems_of(manifest(**spec)))


@pytest.mark.parametrize("value", [1.5, True, "2"])
def test_a_whole_number_is_taken_as_kubernetes_takes_it_and_told_once(value):
    expected = f"input should be a valid integer, got {value!r}"
    objectives = {"ttftMilliseconds": value, "tpotMilliseconds": 150}

    assert problems_of(manifest(prefill={"minReplicas": value})) == [f"spec.prefill.minReplicas: {expected}"]
    assert problems_of(manifest(objectives=objectives)) == [f"spec.objectives.ttftMilliseconds: {expected}"]
    assert problems_of(manifest(gpuBudget=value)) == [f"spec.gpuBudget: {expected}"]


def test_every_problem_is_told_at_once():
    assert len(problems_of(manifest(objectives={"ttftMilliseconds": 0, "tpotMilliseconds": -1, "x": 1}))) == 3


@pytest.mark.parametrize("missing", ["apiVersion", "kind", "metadata", "spec"])
def test_a_manifest_without_its_top_level_fields_is_refused(missing):
    document = manifest()
    del document[missing]

    assert problems_of(document) == [f"{missing}: required field is missing"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "not YAML"),
        ("", "found 0"),
        ("a: 1\n---\nb: 2", "found 2"),
        ("- 1", "found a list"),
        ("text", "found a string"),
        ("[" * 5000, "not "),
    ],
)
def test_text_that_is_not_one_mapping_is_refused(text, problem):
    with pytest.raises(ManifestError, match=problem):
        parse_service(text)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(ManifestError, match="cannot be read"):
        read_service(tmp_path / "missing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="not UTF-8"):
        read_service(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAXIMUM_BYTES + 1))
    with pytest.raises(ManifestError, match="larger"):
        read_service(large)


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("demo://smollm2-135m", ModelSource("demo", "smollm2-135m")),
        ("hf://org/name@main", ModelSource("hf", "org/name@main")),
        ("pvc://claim", ModelSource("pvc", "", "claim")),
        ("pvc://claim/a/b/", ModelSource("pvc", "a/b", "claim")),
        ("/models/x", ModelSource("folder", "/models/x")),
    ],
)
def test_an_address_of_a_model_is_taken_apart(uri, source):
    document = manifest(model={"uri": uri, "name": "m"})

    assert parse_service(yaml.safe_dump(document)).spec.model.source == source


def test_a_live_object_is_read_whatever_its_status_says():
    """A status of another operator version must not keep this one from reading the spec."""
    document = manifest() | {"status": {"conditions": "unreadable", "new": 1}}

    assert check_service(document).spec == check_service(manifest()).spec
    assert check_service(document).status == ServiceStatus()


def test_a_pod_template_is_carried_as_it_was_written():
    """Null and a field that is not there are not the same in Kubernetes."""
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": None,
            "tolerations": [],
            "containers": [{"name": "engine", "env": [{"name": "X", "valueFrom": None}], "volumeMounts": None}],
        },
    }

    read = check_service(manifest(prefill={"template": template})).spec.prefill.template

    assert read is not None
    assert read.document() == template


def test_a_pool_is_checked_by_its_own_kind():
    spec = manifest()["spec"] | {"parallelism": {"tensor": 2, "context": 2}, "accelerator": {"count": 2}}
    pool = {"apiVersion": "kllm.io/v1alpha1", "metadata": {"name": "chat-x"}, "spec": spec}

    assert check_pool(pool | {"kind": "PrefillPool"}).spec.parallelism.world_size == 2
    with pytest.raises(ManifestError, match=r"spec: parallelism\.context must be 1 for decode"):
        check_pool(pool | {"kind": "DecodePool"})
    with pytest.raises(ManifestError, match="kind: expected 'PrefillPool'"):
        check_pool(manifest())
