"""The chart over a matrix of values: valid, locked down, and what the operator's code expects."""

from __future__ import annotations

from pathlib import Path

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from charts.chart_helpers import CHART, MATRIX, MONITORS, notes, of_kind, pods, render

from kllm_operator.config import read_config

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(params=MATRIX, ids=str)
def documents(request, monitored):
    return render(MATRIX[request.param], chart=monitored)


def without_kinds(documents):
    """The kinds that are packed into ConfigMaps have tests of their own."""
    packed = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"} - {"kllm"}
    return [each for each in documents if each["kind"] != "ConfigMap" or each["metadata"]["name"] not in packed]


def test_helm_finds_nothing_to_complain_of():
    assert not [each for each in helm.lint(str(CHART))["messages"] if each["severity"] > 1]


@pytest.mark.parametrize("case", ["default", "adorned"])
def test_objects_are_as_they_were_reviewed(case):
    assert without_kinds(render(MATRIX[case])) == list(yaml.safe_load_all((GOLDEN / f"{case}.yaml").read_text()))


@pytest.mark.parametrize("version", ["1.29", "1.34", "1.37"])
def test_objects_are_valid_in_every_supported_kubernetes(documents, version):
    for document in documents:
        if "monitoring.coreos.com" not in document["apiVersion"]:
            kubernetes_validate.validate(document, version, strict=True)


def test_objects_have_names_of_their_own(documents):
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in documents]

    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, _, name in names)


def test_pods_may_do_next_to_nothing(documents):
    assert pods(documents)
    for template in pods(documents).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_the_operator_is_probed_and_knows_who_and_where_it_is(documents):
    ((_, template),) = [each for each in pods(documents).items() if each[0][0] == "Deployment"]
    (container,) = template["spec"]["containers"]

    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "valueFrom" in each
    }
    assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}


def test_selectors_find_the_operators_pods_and_not_those_of_jobs(documents):
    templates = pods(documents)
    operators = {key for key in templates if key[0] == "Deployment"}
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for each in of_kind(documents, kind):
            selector = each["spec"].get("podSelector", each["spec"].get("selector"))
            wanted = selector.get("matchLabels", selector)
            found = {key for key, pod in templates.items() if wanted.items() <= pod["metadata"]["labels"].items()}
            assert found == operators


@pytest.mark.parametrize("case", MATRIX)
def test_the_operator_reads_the_configuration_that_the_chart_writes(case, tmp_path):
    documents = render(MATRIX[case])
    (config,) = of_kind(documents, "ConfigMap", "kllm" if case != "adorned" else "kllm-llms")
    path = tmp_path / "operator.yaml"
    path.write_text(config["data"]["operator.yaml"])

    read = read_config(path)

    assert read.images.engine.image == "kllm/engine:0.1.0"
    assert list(read.watch_namespaces) == MATRIX[case].get("watchNamespaces", [])
    assert read.leader_election.namespace == "kllm-system"


def test_every_setting_of_the_adorned_release_arrives(tmp_path):
    (config,) = of_kind(render(MATRIX["adorned"]), "ConfigMap", "kllm-llms")
    path = tmp_path / "operator.yaml"
    path.write_text(config["data"]["operator.yaml"])

    read = read_config(path)

    assert read.image_pull_secrets == ("pull",)
    assert read.engine.template == {"spec": {"tolerations": [{"operator": "Exists"}]}}
    assert (read.engine.pace, read.router.drain_seconds) == ("0.1", 10)
    assert (read.router.workers, read.router.access_log) == (3, True)
    assert read.loop_settings.tick_seconds == 2.5
    assert read.network_policy.clients == ({"podSelector": {}},)
    assert read.network_policy.operator_labels["app.kubernetes.io/component"] == "operator"


def test_a_changed_configuration_rolls_the_operator():
    def checksum(values):
        (template,) = (pod for (kind, _), pod in pods(render(values)).items() if kind == "Deployment")
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({}) != checksum({"loop": {"tick_seconds": 1}})


def test_a_single_replica_may_be_evicted():
    assert of_kind(render(), "PodDisruptionBudget")
    assert not of_kind(render({"operator": {"replicas": 1}}), "PodDisruptionBudget")


def test_without_prometheus_operator_nothing_of_it_is_made_and_the_notes_say_so():
    documents = render(MONITORS)

    assert not {each["kind"] for each in documents} & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert "no monitors and rules were made" in notes(MONITORS)
    assert "no monitors" not in notes()


def test_monitors_find_operator_routers_and_engines(monitored):
    documents = render(MONITORS, chart=monitored)
    (service,), (pod,) = of_kind(documents, "ServiceMonitor"), of_kind(documents, "PodMonitor")
    (operator,) = of_kind(documents, "Service")

    assert service["spec"]["selector"]["matchLabels"].items() <= operator["metadata"]["labels"].items()
    assert service["spec"]["endpoints"][0]["port"] == operator["spec"]["ports"][0]["name"]
    assert service["spec"]["endpoints"][0]["honorLabels"] is True
    assert pod["spec"]["namespaceSelector"] == {"any": True}


def test_the_notes_lead_to_an_answer():
    assert "kubectl wait --for=condition=Ready llm/chat" in notes()
    assert "curl" in notes()


def test_histories_are_written_where_the_chart_says_and_nowhere_by_default():
    claim = {"persistentVolumeClaim": {"claimName": "histories"}}
    for given, volume in (({}, {"emptyDir": {}}), ({"volume": claim}, claim)):
        recorded = render({"history": {"enabled": True, "mostMebibytes": 64, **given}})
        (operator,) = of_kind(recorded, "Deployment")
        spec = operator["spec"]["template"]["spec"]
        assert next(each for each in spec["volumes"] if each["name"] == "history") == {"name": "history", **volume}
        (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "history"]
        assert told_to_the_operator(recorded)["history"] == {
            "folder": mount["mountPath"],
            "mostMebibytes": 64,
            "fileMebibytes": 16,
        }
    assert "history" not in told_to_the_operator(render())


def told_to_the_operator(documents):
    """Its configuration."""
    (held,) = [each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == "kllm"]
    return yaml.safe_load(held["data"]["operator.yaml"])
