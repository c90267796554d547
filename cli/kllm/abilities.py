"""What of a manifest one machine does not do: refused if the answer would differ, told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kllm_core.kinds.base import Scaling, TransferBackend
from kllm_core.kinds.model import ModelSpec
from kllm_core.kinds.role import Parallelism
from kllm_core.kinds.service import InferenceService, RolloutSpec, ServiceSpec
from kllm_core.objectives import Role

_MOST_INSTANCES = 16


def refusals(service: InferenceService) -> list[str]:
    """Fields that `kllm up` cannot honour, each with what helps; empty when there is none."""
    return list(_refusals(service.spec))


def notes(service: InferenceService) -> list[str]:
    """Fields that have no effect here, for people to know."""
    spec = service.spec
    told = []
    if spec.scaling is Scaling.EXTERNAL:
        told.append("spec.scaling is External: the pools keep minReplicas, and the planner only advises")
    if spec.router.replicas > 1:
        told.append(f"spec.router.replicas is {spec.router.replicas}; on one machine one router is started")
    if spec.router.api_keys_secret_name is not None:
        told.append("spec.router.apiKeysSecretName is a Secret of a cluster; here keys come with --api-key-file")
    if spec.rollout != RolloutSpec():
        told.append("spec.rollout has no effect on one machine, where a changed manifest is started anew")
    return told


def _model_refusals(model: ModelSpec) -> Iterator[str]:
    if model.source.kind == "pvc":
        yield f"spec.model.uri {model.uri} is a volume of a cluster; on one machine write the absolute folder"
    if model.source.kind != "folder":
        return
    folder = Path(model.uri)
    if not folder.is_dir():
        yield f"spec.model.uri: there is no folder {folder}; for a model of a hub write hf://ORG/NAME"
    elif not (folder / "config.json").is_file():
        yield f"spec.model.uri: {folder} has no config.json, so it is no model folder"


def _refusals(spec: ServiceSpec) -> Iterator[str]:
    yield from _model_refusals(spec.model)
    most = spec.prefill.max_replicas + spec.decode.max_replicas
    if most > _MOST_INSTANCES:
        yield f"maxReplicas of both roles allow {most} instances; one machine runs at most {_MOST_INSTANCES}"
    if spec.scaling is Scaling.EXTERNAL and spec.prefill.min_replicas == 0:
        yield "spec.scaling is External, and with minReplicas 0 nobody would start an instance here; use 1 or more"
    for role in Role:
        pool = spec.role(role)
        if pool.parallelism != Parallelism():
            yield f"spec.{role}.parallelism is not available on one machine yet; leave it out"
        if pool.slots:
            yield f"spec.{role}.slots is not available on one machine; leave it out"
        if pool.template is not None:
            yield f"spec.{role}.template describes a pod, and there are none on one machine; leave it out"
    if spec.router.template is not None:
        yield "spec.router.template describes a pod, and there are none on one machine; leave it out"
    if spec.transfer_backend is not TransferBackend.MOONCAKE:
        yield f"spec.transferBackend {spec.transfer_backend} is not available yet; use {TransferBackend.MOONCAKE}"
