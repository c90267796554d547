"""CustomResourceDefinitions: generated, structural, described and bounded everywhere, and with the models' defaults."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from crds.admission import SCHEMAS, admit, defaulted

from kllm_core.kinds.crds import DEFINITIONS, files
from kllm_core.kinds.manifest import check_pool, check_service
from kllm_core.kinds.pools import PoolSpec
from kllm_core.objectives import Role

ROOT = Path(__file__).parents[2]
KINDS = sorted(SCHEMAS)
SERVERS_OWN = {"apiVersion", "kind", "metadata"}
MODEL = {"uri": "demo://smollm2-135m", "name": "smollm2"}
OBJECTIVES = {"ttftMilliseconds": 1000, "tpotMilliseconds": 150}


def fields(schema, path=""):
    """Every schema below this one with its path, root first."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from fields(field, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from fields(schema[name], f"{path}.{name}")


def own_fields(kind):
    return [(path, field) for path, field in fields(SCHEMAS[kind]) if path.lstrip(".") not in SERVERS_OWN]


def service(**spec):
    head = {"apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "chat"}}
    return head | {"spec": {"model": MODEL, "objectives": OBJECTIVES} | spec}


def test_the_files_are_what_the_models_say():
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "crds").glob("*.yaml")}

    assert written == files(), "run `make generate`"


def test_the_page_about_manifests_is_what_the_models_say():
    from kllm_core.kinds.reference import markdown

    assert (ROOT / "docs/manifest.md").read_text(encoding="utf-8") == markdown(), "run `make generate`"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind):
    """`kubectl explain` has something to say; items and values of maps are described by their field."""
    silent = [path for path, field in own_fields(kind) if not field.get("description")]

    assert [path for path in silent if not path.endswith((".items", ".additionalProperties"))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_list_map_text_and_number_is_bounded(kind):
    """Bounds keep the estimated cost of rules small, and objects too."""
    for path, field in own_fields(kind):
        match field.get("type"):
            case "array":
                assert "maxItems" in field, path
                assert field["x-kubernetes-list-type"] in {"map", "atomic"}, path
                assert (field["x-kubernetes-list-type"] == "map") == ("x-kubernetes-list-map-keys" in field), path
            case "string":
                assert "maxLength" in field or "enum" in field, path
            case "integer":
                assert {"minimum", "maximum", "format"} <= field.keys(), path
                assert field["maximum"] <= 2**53, f"{path}: the API server reads bounds as floats"
                assert field["format"] == ("int32" if field["maximum"] < 2**31 else "int64"), path
            case "object":
                assert (
                    "properties" in field
                    or "maxProperties" in field
                    or field.get("x-kubernetes-preserve-unknown-fields")
                ), path
            case "boolean":
                pass
            case other:
                assert other is None, f"{path} is a {other}"
                assert field["x-kubernetes-int-or-string"], path


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_structural(kind):
    for path, field in fields(SCHEMAS[kind]):
        assert not field.keys() & {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "nullable"}, (
            path
        )
        assert not ("properties" in field and "additionalProperties" in field), path
        assert "default" not in field or not path.startswith(".status"), f"{path}: nobody wrote it, so it is not known"
        assert not path.endswith(".phase"), "conditions instead"


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_kept_in_pod_templates_and_engine_arguments_only(kind):
    kept = [path for path, field in fields(SCHEMAS[kind]) if field.get("x-kubernetes-preserve-unknown-fields")]

    assert kept
    assert [path for path in kept if ".template.spec" not in path and not path.endswith(".engineArgs")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_has_a_message_and_every_default_keeps_the_rules(kind):
    for path, field in fields(SCHEMAS[kind]):
        for rule in field.get("x-kubernetes-validations", ()):
            assert rule["message"], path
            assert "\n" not in rule["message"] + rule["rule"], path
        if "default" in field and field.get("type") == "object":
            # The API server looks at a default before it fills in those below, so it has to be whole.
            assert defaulted(field, field["default"]) == field["default"], path


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"prefill": {"minReplicas": 3}, "decode": {"engineArgs": {"chunked-prefill-size": 512}}},
        {"cache": {"kvType": "BF16"}, "router": {"replicas": 2}, "scaling": "External"},
        {"prefill": {"accelerator": {"count": 4}, "parallelism": {"tensor": 4}}, "gpuBudget": 9},
        {"router": {"template": {"spec": {"nodeSelector": None, "tolerations": []}}}},
    ],
)
def test_defaults_of_schema_and_models_are_the_same(spec):
    """All but maxReplicas, which follows from minReplicas and which no schema can express."""
    stored = defaulted(SCHEMAS["InferenceService"], service(**spec))["spec"]
    read = check_service(service(**spec)).spec.document()
    for role in ("prefill", "decode"):
        if "maxReplicas" not in spec.get(role, {}):
            assert read[role].pop("maxReplicas") == max(1, read[role]["minReplicas"])

    assert stored == read


@pytest.mark.parametrize(("role", "kind"), [(Role.PREFILL, "PrefillPool"), (Role.DECODE, "DecodePool")])
def test_the_pool_of_a_service_is_a_pool_that_can_stand_alone(role, kind):
    given = service(
        prefill={"minReplicas": 2, "maxReplicas": 4}, decode={"minReplicas": 2, "slots": 1}, cache={"pageSize": 32}
    )
    spec = PoolSpec.of(check_service(given).spec, role)
    pool = {"apiVersion": "kllm.io/v1alpha1", "kind": kind, "metadata": {"name": "chat-x"}, "spec": spec.document()}

    assert admit(pool) == []
    assert check_pool(pool).spec == spec
    assert spec.replicas == 2
    assert spec.cache.page_size == 32


def test_pools_can_be_scaled_and_services_have_no_one_number_to_scale():
    scales = {each.model.__name__: each.scale for each in DEFINITIONS}

    assert scales["InferenceService"] is None
    for kind in ("PrefillPool", "DecodePool"):
        for path in scales[kind].values():
            _, part, name = path.split(".")
            assert name in SCHEMAS[kind]["properties"][part]["properties"]


def test_columns_show_fields_that_are_there():
    for definition in DEFINITIONS:
        known = {path for path, _ in fields(SCHEMAS[definition.model.__name__])}
        for column in definition.columns:
            path = column.path.partition("[")[0]
            assert path in known or path.startswith(".metadata."), column


def test_the_command_writes_all_files(tmp_path):
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", "kllm_core.kinds.crds", str(tmp_path / "crds")], check=True, timeout=60)

    names = sorted(path.name for path in (tmp_path / "crds").iterdir())
    assert names == ["kllm.io_decodepools.yaml", "kllm.io_inferenceservices.yaml", "kllm.io_prefillpools.yaml"]
    assert yaml.safe_load((tmp_path / "crds" / names[0]).read_text())["metadata"]["name"] == "decodepools.kllm.io"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_stored_and_read(path):
    documents = list(yaml.safe_load_all(path.read_text()))

    assert documents
    for each in documents:
        if each["kind"] not in SCHEMAS:
            kubernetes_validate.validate(each, "1.34", strict=True)
            continue
        assert admit(each) == []
        check = check_service if each["kind"] == "InferenceService" else check_pool
        assert check(each).metadata.name == each["metadata"]["name"]
