"""Redis, bundled and external: what is made, who may connect, and what the operator is told."""

from __future__ import annotations

import shutil

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from charts.chart_helpers import CHART, notes, of_kind, pods, render
from render.service_helpers import service

from kllm_core import labels
from kllm_operator.config import read_config
from kllm_operator.main import render_config
from kllm_operator.render.objects import labels_of
from kllm_router.shared.address import parse_address

BUNDLED = {"redis": {"enabled": True}}
NAMESPACED = {**BUNDLED, "watchNamespaces": ["team-a", "kllm-system"]}


def told(documents, tmp_path):
    """What the operator makes of what the chart writes about Redis."""
    (config,) = of_kind(documents, "ConfigMap", "kllm")
    path = tmp_path / "operator.yaml"
    path.write_text(config["data"]["operator.yaml"])
    return render_config(read_config(path)).router.redis


def secrets(documents):
    return {each["metadata"]["namespace"]: each["stringData"] for each in of_kind(documents, "Secret", "kllm-redis")}


def test_without_it_nothing_is_made_and_the_operator_is_told_nothing(tmp_path):
    documents = render()

    assert told(documents, tmp_path) is None
    assert not [each for each in documents if "redis" in each["metadata"]["name"]]
    assert "redis" not in yaml.safe_dump(of_kind(documents, "ConfigMap", "kllm"))


@pytest.mark.parametrize("version", ["1.29", "1.34", "1.37"])
@pytest.mark.parametrize("values", [BUNDLED, NAMESPACED])
def test_its_objects_are_valid(values, version):
    made = [each for each in render(values) if each["metadata"]["name"] == "kllm-redis"]

    assert {each["kind"] for each in made} == {"Secret", "Deployment", "Service", "NetworkPolicy"}
    for document in made:
        kubernetes_validate.validate(document, version, strict=True)


def test_its_pod_may_do_next_to_nothing_and_keeps_nothing():
    documents = render(BUNDLED)
    spec = pods(documents)["Deployment", "kllm-redis"]["spec"]
    (container,) = spec["containers"]
    configuration = secrets(documents)["kllm-system"]["redis.conf"].splitlines()

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert {'save ""', "appendonly no", "maxmemory 32mb"} <= set(configuration)
    assert "password" not in yaml.safe_dump(spec)


def test_the_service_and_the_policy_find_it_and_not_the_operator():
    documents = render(BUNDLED)
    templates = pods(documents)
    for each in [*of_kind(documents, "Service"), *of_kind(documents, "NetworkPolicy")]:
        selector = each["spec"].get("podSelector", each["spec"].get("selector"))
        wanted = selector.get("matchLabels", selector)
        found = {key for key, pod in templates.items() if wanted.items() <= pod["metadata"]["labels"].items()}
        assert found == {("Deployment", each["metadata"]["name"])}


def test_the_operator_and_the_routers_find_redis_by_the_secret(tmp_path):
    documents = render(BUNDLED)
    redis = told(documents, tmp_path)
    (made,) = of_kind(documents, "Service", "kllm-redis")
    data = secrets(documents)["kllm-system"]
    address = parse_address(data[redis.secret_key])

    assert redis.secret_name == "kllm-redis"
    assert address.host == f"kllm-redis.{made['metadata']['namespace']}.svc"
    assert address.port == made["spec"]["ports"][0]["port"]
    assert address.password == data["password"]
    assert f"requirepass {data['password']}" in data["redis.conf"].splitlines()
    assert len(data["password"]) == 32


def test_a_release_draws_its_own_password():
    chart_values = {**BUNDLED, "commonLabels": {"draw": "again"}}

    assert (
        secrets(render(BUNDLED))["kllm-system"]["password"] != secrets(render(chart_values))["kllm-system"]["password"]
    )


def test_named_namespaces_get_the_url_and_not_the_configuration():
    made = secrets(render(NAMESPACED))

    assert made.keys() == {"kllm-system", "team-a"}
    assert made["team-a"] == {"url": made["kllm-system"]["url"]}


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [
        (BUNDLED, {}),
        (
            NAMESPACED,
            {
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "kllm-system"]}
                ]
            },
        ),
    ],
)
def test_routers_of_the_services_that_are_kept_may_connect_and_nobody_else(values, namespaces):
    (policy,) = of_kind(render(values), "NetworkPolicy", "kllm-redis")
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    routers = labels_of(service(), labels.COMPONENT_ROUTER)
    engines = labels_of(service(), labels.COMPONENT_ENGINE)

    assert peer["namespaceSelector"] == namespaces
    assert peer["podSelector"]["matchLabels"].items() <= routers.items()
    assert not peer["podSelector"]["matchLabels"].items() <= engines.items()
    assert rule["ports"] == [{"protocol": "TCP", "port": "redis"}]
    assert not of_kind(render({**values, "networkPolicy": {"enabled": False}}), "NetworkPolicy")


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory):
    """The chart as on a cluster that has the secret already, of which rendering offline cannot be told."""
    chart = tmp_path_factory.mktemp("upgraded") / "kllm"
    shutil.copytree(CHART, chart)
    path = chart / "templates" / "redis" / "server.yaml"
    asked = 'lookup "v1" "Secret" .Release.Namespace $name'
    assert asked in path.read_text()
    path.write_text(path.read_text().replace(asked, 'dict "data" (dict "password" ("kept" | b64enc))'))
    return chart


def test_the_password_is_kept_on_upgrade(upgraded):
    data = secrets(render(BUNDLED, chart=upgraded))["kllm-system"]

    assert data["password"] == parse_address(data["url"]).password == "kept"
    assert "requirepass kept" in data["redis.conf"].splitlines()


def test_another_configuration_rolls_it_and_an_equal_one_does_not(upgraded):
    def checksum(values, **more):
        template = pods(render({"redis": {"enabled": True, **values}, **more}, chart=upgraded))
        return template["Deployment", "kllm-redis"]["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({}, loop={"tick_seconds": 2}) != checksum({"maxMemory": "64mb"})


def test_it_runs_where_the_operator_may_run():
    placed = {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "high"}
    spec = pods(render({**BUNDLED, "operator": placed}))["Deployment", "kllm-redis"]["spec"]

    assert placed.items() <= spec.items()


def test_an_external_one_is_told_by_url_or_by_secret_and_nothing_is_made(tmp_path):
    by_url = render({"redis": {"external": {"url": "rediss://cache.example:6380/2"}}})
    by_secret = render({"redis": {"external": {"existingSecret": "cache", "existingSecretKey": "it"}}})

    assert told(by_url, tmp_path).url == "rediss://cache.example:6380/2"
    assert (told(by_secret, tmp_path).secret_name, told(by_secret, tmp_path).secret_key) == ("cache", "it")
    assert not [each for each in [*by_url, *by_secret] if "redis" in each["metadata"]["name"]]


@pytest.mark.parametrize(
    ("redis", "message"),
    [
        ({"enabled": True, "external": {"url": "redis://cache"}}, "redis.enabled"),
        ({"enabled": True, "external": {"existingSecret": "cache"}}, "redis.enabled"),
        ({"external": {"url": "redis://cache", "existingSecret": "cache"}}, "redis.external.existingSecret"),
        ({"external": {"url": "redis://:word@cache"}}, "url"),
        ({"external": {"url": "cache:6379"}}, "url"),
        ({"maxMemory": "much"}, "maxMemory"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(redis, message):
    with pytest.raises(helm.HelmError, match=message):
        render({"redis": redis})


def test_the_notes_say_where_the_secret_has_to_be():
    assert "kubectl create secret generic kllm-redis" in notes(BUNDLED)
    assert "kubectl create secret" not in notes(NAMESPACED)
    assert "cache, in each service's namespace" in notes({"redis": {"external": {"existingSecret": "cache"}}})
    assert "Redis" not in notes()
