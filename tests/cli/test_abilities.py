"""What one machine cannot do is refused by its field, and what has no effect is told."""

import pytest
import yaml

from kllm.abilities import notes, refusals
from kllm_core.kinds.manifest import parse_service


def service(**spec):
    base = {
        "model": {"uri": "demo://tiny-random-llama", "name": "m"},
        "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
    }
    document = {"apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "s"}}
    return parse_service(yaml.safe_dump(document | {"spec": base | spec}))


def test_the_smallest_manifest_is_neither_refused_nor_commented():
    assert refusals(service()) == []
    assert notes(service()) == []


def test_a_service_may_be_at_zero():
    assert refusals(service(prefill={"minReplicas": 0}, decode={"minReplicas": 0})) == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"scaling": "External", "prefill": {"minReplicas": 0}, "decode": {"minReplicas": 0}},
            "spec.scaling is External, and with minReplicas 0",
        ),
        ({"prefill": {"parallelism": {"tensor": 2}, "accelerator": {"count": 2}}}, "spec.prefill.parallelism"),
        ({"decode": {"slots": 1}}, "spec.decode.slots"),
        ({"decode": {"template": {"spec": {}}}}, "spec.decode.template"),
        ({"router": {"template": {"spec": {}}}}, "spec.router.template"),
        ({"model": {"uri": "pvc://models/x", "name": "m"}}, "spec.model.uri pvc://models/x is a volume of a cluster"),
        ({"model": {"uri": "/no/such/folder", "name": "m"}}, "spec.model.uri: there is no folder /no/such/folder"),
        ({"transferBackend": "NIXL"}, "spec.transferBackend"),
        ({"prefill": {"maxReplicas": 20}}, "maxReplicas"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(spec, field):
    assert any(problem.startswith(field) for problem in refusals(service(**spec)))


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"scaling": "External"}, "only advises"),
        ({"router": {"replicas": 2}}, "spec.router.replicas"),
        ({"rollout": {"surge": 2}}, "spec.rollout"),
    ],
)
def test_a_field_without_effect_is_told(spec, word):
    assert any(word in note for note in notes(service(**spec)))
