"""The pod of one instance. Pure.

It is the same for a prefill instance, a decode instance and a slot, but for its labels and one argument: a flip and a
start from a slot change labels only, and pods of equal revision are worth the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kllm_core import labels
from kllm_core.kinds.role import RoleSpec
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.render.containers import container, pod_security
from kllm_operator.render.engine_template import Reserved, merged
from kllm_operator.render.engine_volumes import (
    ACCESS,
    MODEL_LINK,
    RUN,
    TOKEN_FILE,
    WORK,
    model_at,
    mounts,
    needs_fetching,
    volumes,
)
from kllm_operator.render.objects import labels_of
from kllm_operator.render.owner import Owner

AGENT_PORT = 7300
HTTP_PORT = 30000
BOOTSTRAP_PORT = 8998
CONTAINER = "engine"
MODEL_CONTAINER = "model"

_KILL_SECONDS = 15
"""After the drain: time for the engine to end before it is killed."""
_DIGITS = 10


@dataclass(frozen=True)
class EngineConfig:
    """What the operator adds to each instance's pod.

    Attributes:
        image: of the engine.
        pull_policy: IfNotPresent, Always or Never.
        pull_secrets: names of secrets in the service's namespace.
        command: the engine's program.
        template: pod template under those of services; None adds nothing.
        drain_seconds: that an instance which is told to end has for what it holds.
        pace: how long steps are made to last; None leaves them as they are.
    """

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    command: tuple[str, ...] = ("kllm-engine",)
    template: Mapping[str, Any] | None = None
    drain_seconds: float = 30.0
    pace: str | None = None


def engine_pod(
    service: InferenceService, config: EngineConfig, *, name: str, pool: Role, slot: bool, owner: Owner
) -> dict[str, Any]:
    """The pod of an instance, or of a slot.

    Args:
        service: whose instance it is.
        config: the operator's part.
        name: of the pod.
        pool: of which role's pool it is.
        slot: it waits for a role.
        owner: that pool's object.

    Raises:
        TemplateError: a pod template cannot be used.
    """
    template = _template(service, config, pool)
    role = labels.ROLE_SLOT if slot else pool.value
    own = labels_of(service, labels.COMPONENT_ENGINE) | {labels.ROLE: role, labels.REVISION: _hash(template)}
    arguments = _engine(template)["args"]
    arguments[1:1] = ["--slot"] if slot else ["--role", pool.value]
    metadata = template["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": service.metadata.namespace,
            "labels": metadata.get("labels", {}) | own,
            "annotations": metadata.get("annotations", {}),
            "ownerReferences": [owner.reference()],
        },
        "spec": template["spec"],
    }


def check_templates(service: InferenceService, config: EngineConfig) -> None:
    """Whether all pods can be made.

    Raises:
        TemplateError: a pod template cannot be used.
    """
    for pool in Role:
        engine_revision(service, config, pool)


def engine_revision(service: InferenceService, config: EngineConfig, pool: Role) -> str:
    """What pods of a pool are made from, as ten hexadecimal digits; equal for roles whose pods are the same.

    Raises:
        TemplateError: a pod template cannot be used.
    """
    return _hash(_template(service, config, pool))


def _template(service: InferenceService, config: EngineConfig, pool: Role) -> dict[str, Any]:
    """Metadata and spec of the pod without a role: what its revision stands for."""
    spec = service.spec.role(pool)
    reserved = _reserved(spec)
    pod = merged(_rendered(service, config, spec), config.template, where="engine.template", reserved=reserved)
    if spec.template is None:
        return pod
    return merged(pod, spec.template.document(), where=f"spec.{pool}.template", reserved=reserved)


def _rendered(service: InferenceService, config: EngineConfig, spec: RoleSpec) -> dict[str, Any]:
    source = service.spec.model.source
    pod: dict[str, Any] = {
        "serviceAccountName": f"{service.name}-engine",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(config.drain_seconds) + _KILL_SECONDS,
        "securityContext": pod_security(),
        "containers": [_agent(service, config, spec)],
        "volumes": volumes(service.name, source),
    }
    if config.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in config.pull_secrets]
    if needs_fetching(source):
        pod["initContainers"] = [_fetcher(service, config)]
    return {"metadata": {}, "spec": pod}


def _fetcher(service: InferenceService, config: EngineConfig) -> dict[str, Any]:
    model = service.spec.model
    places = ["--cache", ACCESS["models"], "--link", MODEL_LINK, "--work-dir", WORK]
    fetcher = _container(config, MODEL_CONTAINER, ["model", model.uri, *places])
    return fetcher | {"volumeMounts": mounts(model.source, only=("models", "work", "tmp"))}


def _agent(service: InferenceService, config: EngineConfig, spec: RoleSpec) -> dict[str, Any]:
    def asks(service: str) -> dict[str, Any]:
        return {"grpc": {"port": AGENT_PORT, "service": service}}

    accelerator = spec.accelerator
    held = {accelerator.resource_name: accelerator.count} if accelerator.count else {}
    return _container(config, CONTAINER, _agent_arguments(service, config)) | {
        "ports": [
            {"name": "agent", "containerPort": AGENT_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "bootstrap", "containerPort": BOOTSTRAP_PORT, "protocol": "TCP"},
        ],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
            {"name": "SGLANG_HOST_IP", "value": "$(POD_IP)"},
        ],
        # A failed liveness ends the instance for good: an agent that is only slow on a busy node must not meet it.
        "startupProbe": asks("liveness") | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 300},
        "livenessProbe": asks("liveness") | {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "readinessProbe": asks("readiness") | {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 3},
        "resources": {"limits": held, "requests": dict(held)} if held else {},
        "volumeMounts": mounts(service.spec.model.source),
    }


def _container(config: EngineConfig, name: str, arguments: list[str]) -> dict[str, Any]:
    return container(
        name, image=config.image, pull_policy=config.pull_policy, command=config.command, arguments=arguments
    )


def _agent_arguments(service: InferenceService, config: EngineConfig) -> list[str]:
    spec = service.spec
    return [
        "agent",
        "--instance-id", "$(POD_NAME)",
        "--service", service.name,
        "--model", model_at(spec.model.source),
        "--model-name", spec.model.name,
        "--listen", f"0.0.0.0:{AGENT_PORT}",
        "--token-file", TOKEN_FILE,
        "--run-dir", RUN,
        "--work-dir", WORK,
        "--forward-engine-log",
        "--page-size", str(spec.cache.page_size),
        "--kv-type", spec.cache.kv_type.value,
        "--prefill-engine-args", _engine_arguments(spec.prefill),
        "--decode-engine-args", _engine_arguments(spec.decode),
        "--http-host", "0.0.0.0",
        "--http-port", str(HTTP_PORT),
        "--bootstrap-port", str(BOOTSTRAP_PORT),
        "--advertise-host", "$(POD_IP)",
        "--drain-seconds", f"{config.drain_seconds:g}",
        *(() if config.pace is None else ("--pace", config.pace)),
    ]  # fmt: skip


def _engine_arguments(spec: RoleSpec) -> str:
    """What one role's engines are started with, in an order of its own: equal arguments are equal text."""
    sizes: dict[str, Any] = {
        "tp-size": spec.parallelism.tensor, "dp-size": spec.parallelism.data, "pp-size": spec.parallelism.pipeline,
        "ep-size": spec.parallelism.expert, "attn-cp-size": spec.parallelism.context,
    }  # fmt: skip
    spread = {name: size for name, size in sizes.items() if size > 1}
    if spec.parallelism.data > 1:
        spread["enable-dp-attention"] = True  # the data parallel groups split one tensor group
    return json.dumps(spread | dict(spec.engine_args), sort_keys=True)


def _reserved(spec: RoleSpec) -> Reserved:
    return Reserved(
        spec=frozenset({"restartPolicy", "terminationGracePeriodSeconds"}),
        containers={"containers": frozenset({CONTAINER}), "initContainers": frozenset({MODEL_CONTAINER})},
        container_fields=frozenset({"command", "args", "ports", "readinessProbe", "terminationMessagePolicy"}),
        env=frozenset({"POD_NAME", "POD_IP", "SGLANG_HOST_IP"}),
        mounts=frozenset(ACCESS.values()),
        resources={spec.accelerator.resource_name: "accelerator.count"},
        volumes=frozenset({"fleet-token", "model", "run"}),
    )


def _engine(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
    return found


def _hash(template: Mapping[str, Any]) -> str:
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
