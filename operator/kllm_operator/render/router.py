"""A service's routers: Deployment, Service and disruption budget. Pure."""

from __future__ import annotations

import math
from typing import Any

from kllm_core import labels
from kllm_core.kinds.service import InferenceService
from kllm_operator.render.config import RedisConfig, RenderConfig
from kllm_operator.render.containers import container, pod_security
from kllm_operator.render.engine_template import Reserved, merged
from kllm_operator.render.engine_volumes import ACCESS, MODEL_LINK, TOKEN_FILE, WORK, model_at, mounts, needs_fetching
from kllm_operator.render.engine_volumes import volumes as engine_volumes
from kllm_operator.render.objects import labels_of, rendered, selector_of

HTTP_PORT = 8000
GRPC_PORT = 8001

CONTAINER = "router"
MODEL_CONTAINER = "model"

_KILL_SECONDS = 5
"""After the drain: time for the router to close before it is killed."""

_HOME = {"name": "HOME", "value": WORK}
_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
_KEYS = "api-keys"
_KEYS_FOLDER = "/etc/kllm/api-keys"
_REDIS = "redis-url"
_REDIS_FOLDER = "/etc/kllm/redis"
_MOUNTED = ("fleet-token", "model", "models", "work", "tmp")
_RESERVED = Reserved(
    spec=frozenset(
        {"restartPolicy", "terminationGracePeriodSeconds", "serviceAccountName", "automountServiceAccountToken"}
    ),
    containers={"containers": frozenset({CONTAINER}), "initContainers": frozenset({MODEL_CONTAINER})},
    container_fields=frozenset({"command", "args", "ports", "readinessProbe", "terminationMessagePolicy"}),
    mounts=frozenset(ACCESS[name] for name in _MOUNTED) | {_KEYS_FOLDER, _REDIS_FOLDER},
    volumes=frozenset({"fleet-token", "model", _KEYS, _REDIS}),
)


def deployment(service: InferenceService, config: RenderConfig) -> dict[str, Any]:
    """The routers. A new one is ready before an old one ends.

    Raises:
        TemplateError: a pod template cannot be used.
    """
    selector = selector_of(service, labels.COMPONENT_ROUTER)
    spec = {
        "replicas": service.spec.router.replicas,
        "revisionHistoryLimit": 3,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": selector},
        "template": _template(service, config),
    }
    return _rendered(service, "apps/v1", "Deployment", f"{service.name}-router", spec)


def router_service(service: InferenceService) -> dict[str, Any]:
    """Where clients go: port 80 for HTTP, 8001 for gRPC."""
    spec = {
        "type": "ClusterIP",
        "selector": selector_of(service, labels.COMPONENT_ROUTER),
        "ports": [
            {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"},
            {
                "name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "protocol": "TCP",
                "appProtocol": "kubernetes.io/h2c",
            },
        ],
    }  # fmt: skip
    return _rendered(service, "v1", "Service", service.name, spec)


def disruption_budget(service: InferenceService) -> dict[str, Any]:
    """One router at a time may be evicted; a service with a single one must not hold up a node's drain."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector_of(service, labels.COMPONENT_ROUTER)},
    }
    return _rendered(service, "policy/v1", "PodDisruptionBudget", f"{service.name}-router", spec)


def _rendered(service: InferenceService, version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    component = labels.COMPONENT_ROUTER
    return rendered(service, api_version=version, kind=kind, name=name, component=component, body={"spec": spec})


def _template(service: InferenceService, config: RenderConfig) -> dict[str, Any]:
    pod = _pod(service, config)
    pod = merged(pod, config.router.template, where="router.template", reserved=_RESERVED)
    given = service.spec.router.template
    if given is not None:
        where = "spec.router.template"
        pod = merged(pod, given.document(), where=where, reserved=_RESERVED)
    metadata = pod["metadata"]
    own = labels_of(service, labels.COMPONENT_ROUTER)
    return {**pod, "metadata": {**metadata, "labels": metadata.get("labels", {}) | own}}


def _pod(service: InferenceService, config: RenderConfig) -> dict[str, Any]:
    source, router = service.spec.model.source, config.router
    grace = math.ceil(router.lame_duck_seconds + router.drain_seconds) + _KILL_SECONDS
    pod: dict[str, Any] = {
        "serviceAccountName": f"{service.name}-router",
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace,
        "securityContext": pod_security(),
        "topologySpreadConstraints": [
            _spread(service, key) for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        ],
        "containers": [_router(service, config)],
        "volumes": [volume for volume in engine_volumes(service.name, source) if volume["name"] in _MOUNTED],
    }
    keys = service.spec.router.api_keys_secret_name
    if keys is not None:
        secret = {"secretName": keys, "items": [{"key": "keys", "path": "keys"}], "defaultMode": 0o440}
        pod["volumes"].append({"name": _KEYS, "secret": secret})
    redis = router.redis
    if redis is not None and redis.secret_name is not None:
        items = [{"key": redis.secret_key, "path": "url"}]
        # Optional: routers do not stay away because they cannot share.
        url = {"secretName": redis.secret_name, "items": items, "defaultMode": 0o440, "optional": True}
        pod["volumes"].append({"name": _REDIS, "secret": url})
    if router.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in router.pull_secrets]
    if needs_fetching(source):
        pod["initContainers"] = [_model(service, config)]
    return {"metadata": {}, "spec": pod}


def _spread(service: InferenceService, key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector_of(service, labels.COMPONENT_ROUTER)},
        "matchLabelKeys": ["pod-template-hash"],
    }


def _router(service: InferenceService, config: RenderConfig) -> dict[str, Any]:
    def asks(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http"}}

    router = config.router
    return container(
        CONTAINER,
        image=router.image,
        pull_policy=router.pull_policy,
        command=router.command,
        arguments=_arguments(service, config),
    ) | {
        "env": [_HOME],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
        ],
        "startupProbe": asks("/livez") | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 120},
        "livenessProbe": asks("/livez") | {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3},
        # Whether this router knows its fleet, not whether the fleet can serve: clients of a service without engines
        # are to be told so, which needs a router that is reached.
        "readinessProbe": asks("/readyz/router") | {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 2},
        "resources": {"requests": dict(_REQUESTS), "limits": {"memory": "2Gi"}},
        "volumeMounts": [*mounts(service.spec.model.source, only=_MOUNTED), *_secret_mounts(service, config)],
    }


def _secret_mounts(service: InferenceService, config: RenderConfig) -> list[dict[str, Any]]:
    redis = config.router.redis
    there = {
        _KEYS: (_KEYS_FOLDER, service.spec.router.api_keys_secret_name is not None),
        _REDIS: (_REDIS_FOLDER, redis is not None and redis.secret_name is not None),
    }
    return [{"name": name, "mountPath": path, "readOnly": True} for name, (path, used) in there.items() if used]


def _redis_arguments(redis: RedisConfig | None) -> list[str]:
    if redis is None:
        return []
    return ["--redis-url-file", f"{_REDIS_FOLDER}/url"] if redis.url is None else ["--redis-url", redis.url]


def _arguments(service: InferenceService, config: RenderConfig) -> list[str]:
    spec, router = service.spec, config.router
    return [
        "--listen", f"0.0.0.0:{HTTP_PORT}",
        "--grpc-listen", f"0.0.0.0:{GRPC_PORT}",
        "--discovery", "kubernetes",
        "--namespace", service.metadata.namespace,
        "--service", service.name,
        "--token-file", TOKEN_FILE,
        "--model-name", spec.model.name,
        "--tokenizer", model_at(spec.model.source),
        "--page-size", str(spec.cache.page_size),
        "--binding", spec.router.binding.value,
        "--lame-duck-seconds", f"{router.lame_duck_seconds:g}",
        "--drain-seconds", f"{router.drain_seconds:g}",
        *(("--wait-for-start-seconds", str(spec.wait_for_start_seconds)) if spec.wait_for_start_seconds else ()),
        *(() if spec.router.api_keys_secret_name is None else ("--api-key-file", f"{_KEYS_FOLDER}/keys")),
        *(("--workers", str(router.workers)) if router.workers > 1 else ()),
        *(("--access-log", "-") if router.access_log else ()),
        *_redis_arguments(router.redis),
    ]  # fmt: skip


def _model(service: InferenceService, config: RenderConfig) -> dict[str, Any]:
    """Makes the tokenizer available. Demo models come with the engine's program only."""
    uri, places = service.spec.model.uri, ["--cache", ACCESS["models"], "--link", MODEL_LINK]
    is_demo = service.spec.model.source.kind == "demo"
    program = config.engine if is_demo else config.router
    return container(
        MODEL_CONTAINER,
        image=program.image,
        pull_policy=program.pull_policy,
        command=program.command,
        arguments=["model", uri, *places, "--work-dir", WORK] if is_demo else ["tokenizer", uri, *places],
    ) | {
        "env": [_HOME],
        "resources": {"requests": dict(_REQUESTS)},
        "volumeMounts": mounts(service.spec.model.source, only=("models", "work", "tmp")),
    }
