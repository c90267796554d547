"""The routers' Deployment: what they are told, how they come and go, what they may do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from render.engine_helpers import arguments, named, pod, service
from render.service_helpers import CONFIG, URIS, documents, flags, of_kind, router_pod

from kllm_core import labels
from kllm_operator.render.config import RedisConfig
from kllm_operator.render.engine_template import TemplateError
from kllm_router import arguments as command_line
from kllm_router.shared.address import parse_address

GOLDEN = Path(__file__).with_name("golden") / "service.yaml"


def router(template):
    return named(template["spec"]["containers"], "router")


def test_a_service_is_rendered_as_it_was_reviewed():
    assert documents() == list(yaml.safe_load_all(GOLDEN.read_text()))


@pytest.mark.parametrize("uri", URIS)
def test_the_router_itself_takes_the_arguments(uri, tmp_path):
    words = router(router_pod(service(uri)))["args"]
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough")
    words[words.index("--token-file") + 1] = str(token)

    given = command_line.parse(words)

    assert (given.listen, given.grpc_listen) == (("0.0.0.0", 8000), ("0.0.0.0", 8001))
    assert given.model_name == "smollm2"
    assert (given.lame_duck_seconds, given.drain_seconds) == (5.0, 60.0)


@pytest.mark.parametrize(
    ("least", "told", "wanted"),
    [(0, {}, "600"), (1, {}, None), (0, {"waitForStartSeconds": 0}, None), (1, {"waitForStartSeconds": 30}, "30")],
)
def test_requests_wait_for_a_start_where_a_service_may_be_at_zero_or_the_manifest_says_so(least, told, wanted):
    pool = {"minReplicas": least}
    template = router_pod(service(prefill=pool, decode=pool, router=told))

    assert flags(router(template)).get("--wait-for-start-seconds") == wanted


@pytest.mark.parametrize("uri", URIS)
def test_it_reads_the_tokenizer_where_engines_read_the_model(uri):
    template = router_pod(service(uri))

    assert flags(router(template))["--tokenizer"] == arguments(pod(service(uri)))["--model"]


@pytest.mark.parametrize(
    ("uri", "image", "words"),
    [
        ("hf://org/name", CONFIG.router.image, ["tokenizer", "hf://org/name"]),
        ("demo://smollm2-135m", CONFIG.engine.image, ["model", "demo://smollm2-135m"]),
    ],
)
def test_an_init_container_makes_the_tokenizer_available(uri, image, words):
    (container,) = router_pod(service(uri))["spec"]["initContainers"]

    assert container["image"] == image
    assert container["args"][:2] == words
    assert flags(container)["--link"] == flags(router(router_pod(service(uri))))["--tokenizer"]


@pytest.mark.parametrize("uri", ["pvc://weights/llama", "/models/llama"])
def test_a_model_that_is_there_already_is_mounted_and_cannot_be_written(uri):
    spec = router_pod(service(uri))["spec"]

    assert "initContainers" not in spec
    assert named(spec["containers"][0]["volumeMounts"], "model")["readOnly"] is True


def test_client_keys_are_read_from_the_secret_that_the_service_names(tmp_path):
    template = router_pod(service(router={"apiKeysSecretName": "team-keys"}))
    (mount,) = [each for each in router(template)["volumeMounts"] if each["name"] == "api-keys"]
    volume = named(template["spec"]["volumes"], "api-keys")

    assert volume["secret"]["secretName"] == "team-keys"
    assert mount["readOnly"]
    assert flags(router(template))["--api-key-file"] == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    assert "--api-key-file" not in flags(router(router_pod(service())))


def sharing(**values):
    return replace(CONFIG, router=replace(CONFIG.router, redis=RedisConfig(**values)))


def test_routers_are_told_where_redis_is_and_take_the_argument():
    words = flags(router(router_pod(config=sharing(url="redis://cache:7000/1"))))

    assert str(parse_address(words["--redis-url"])) == "cache:7000/1"
    assert "--redis-url-file" not in words
    assert not {"--redis-url", "--redis-url-file"} & flags(router(router_pod())).keys()


def test_a_url_with_a_password_is_mounted_and_a_router_starts_without_it():
    template = router_pod(config=sharing(secret_name="cache", secret_key="it"))
    (mount,) = [each for each in router(template)["volumeMounts"] if each["name"] == "redis-url"]
    secret = named(template["spec"]["volumes"], "redis-url")["secret"]

    assert (secret["secretName"], secret["optional"]) == ("cache", True)
    assert secret["items"] == [{"key": "it", "path": "url"}]
    assert mount["readOnly"]
    assert flags(router(template))["--redis-url-file"] == f"{mount['mountPath']}/url"
    assert "redis" not in str(template["spec"]["initContainers"])


def test_workers_and_the_access_log_are_asked_for_where_they_are_wanted():
    config = replace(CONFIG, router=replace(CONFIG.router, workers=4, access_log=True))
    words = flags(router(router_pod(config=config)))

    assert (words["--workers"], words["--access-log"]) == ("4", "-")
    assert not {"--workers", "--access-log"} & flags(router(router_pod())).keys()


def test_it_has_time_to_end_what_it_carries():
    config = replace(CONFIG, router=replace(CONFIG.router, lame_duck_seconds=2.5, drain_seconds=100.2))
    template = router_pod(config=config)

    words = flags(router(template))
    assert (words["--lame-duck-seconds"], words["--drain-seconds"]) == ("2.5", "100.2")
    assert template["spec"]["terminationGracePeriodSeconds"] >= 2.5 + 100.2 + 5


def test_a_new_router_is_ready_before_an_old_one_ends():
    (deployment,) = of_kind("Deployment")

    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_router_of_a_fleet_that_cannot_serve_is_still_reached():
    probes = router(router_pod())

    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz/router"


def test_one_router_at_a_time_may_be_evicted_and_a_single_one_holds_up_no_node():
    (budget,) = of_kind("PodDisruptionBudget")

    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_clients_reach_http_and_grpc():
    (made,) = of_kind("Service")

    ports = {port["name"]: (port["port"], port["targetPort"]) for port in made["spec"]["ports"]}
    assert ports == {"http": (80, "http"), "grpc": (8001, "grpc")}
    assert made["metadata"]["name"] == "chat"


def test_only_the_router_has_the_token_of_its_account():
    assert router_pod()["spec"]["automountServiceAccountToken"] is True
    assert router_pod()["spec"]["serviceAccountName"] == "chat-router"


@pytest.mark.parametrize("uri", URIS)
def test_no_container_may_do_more_than_it_needs(uri):
    spec = router_pod(service(uri))["spec"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= router(router_pod()).keys()


def test_templates_of_operator_and_service_are_merged_in_that_order():
    wide = {
        "spec": {
            "nodeSelector": {"pool": "a", "disk": "ssd"},
            "containers": [{"name": "router", "env": [{"name": "A", "value": "wide"}]}],
        }
    }
    own = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"pool": "b"},
            "containers": [{"name": "router", "resources": {"limits": {"cpu": "2"}}}],
        },
    }
    config = replace(CONFIG, router=replace(CONFIG.router, template=wide))
    template = router_pod(service(router={"template": own}), config)

    assert template["spec"]["nodeSelector"] == {"pool": "b", "disk": "ssd"}
    assert {"name": "A", "value": "wide"} in router(template)["env"]
    assert router(template)["resources"]["limits"] == {"cpu": "2", "memory": "2Gi"}
    assert {"team": "a", labels.SERVICE: "chat"}.items() <= template["metadata"]["labels"].items()


def test_a_template_for_the_init_container_does_no_harm_where_there_is_none():
    wide = {"spec": {"initContainers": [{"name": "model", "env": [{"name": "HF_ENDPOINT", "value": "x"}]}]}}
    config = replace(CONFIG, router=replace(CONFIG.router, template=wide))

    assert not router_pod(service("pvc://weights"), config)["spec"].get("initContainers")
    (container,) = router_pod(service("hf://org/name"), config)["spec"]["initContainers"]
    assert {"name": "HF_ENDPOINT", "value": "x"} in container["env"]


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"serviceAccountName": "admin"}}, "router.template.spec.serviceAccountName"),
        (
            {"spec": {"containers": [{"name": "router", "args": []}]}},
            "router.template.spec.containers[router].args",
        ),
        ({"metadata": {"labels": {"kllm.io/service": "x"}}}, "router.template.metadata.labels[kllm.io/service]"),
    ],
)
def test_what_a_template_must_not_touch_is_refused_by_its_name(template, field):
    config = replace(CONFIG, router=replace(CONFIG.router, template=template))

    with pytest.raises(TemplateError) as refused:
        documents(config=config)

    assert refused.value.field == field
