"""What an instance's pod has mounted: the model, room to work in, and the fleet token. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kllm_core.kinds.model import ModelSource

TOKEN_FILE = "/etc/kllm/fleet/token"  # noqa: S105 - a path
RUN = "/run/kllm"
WORK = "/var/lib/kllm/work"
MODEL_LINK = f"{WORK}/model"
"""Where the init container puts the model. Not beside the files: several services may share one cache of models."""

_MODEL = "/var/lib/kllm/model"
ACCESS = {
    "fleet-token": "/etc/kllm/fleet",
    "model": _MODEL,
    "models": "/var/lib/kllm/models",
    "work": WORK,
    "run": RUN,
    "shm": "/dev/shm",  # noqa: S108 - a mount of the pod's own, as the next one
    "tmp": "/tmp",  # noqa: S108
}
"""Paths of the pod's volumes, by their names."""

_READ_ONLY = ("fleet-token", "model")


def needs_fetching(source: ModelSource) -> bool:
    """Whether an init container makes the model available."""
    return source.kind in {"hf", "demo"}


def model_at(source: ModelSource) -> str:
    """Where the agent finds the model."""
    if needs_fetching(source):
        return MODEL_LINK
    return f"{_MODEL}/{source.path}" if source.kind == "pvc" and source.path else _MODEL


def volumes(service: str, source: ModelSource) -> list[dict[str, Any]]:
    """All volumes of the pod."""
    memory: dict[str, Any] = {"medium": "Memory"}
    kept: list[dict[str, Any]] = [
        {"name": "fleet-token", "secret": {"secretName": f"{service}-fleet-token", "defaultMode": 0o440}},
        {"name": "run", "emptyDir": dict(memory)},
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": dict(memory)},
    ]
    return [*kept, _model(source)]


def mounts(source: ModelSource, *, only: Collection[str] = tuple(ACCESS)) -> list[dict[str, Any]]:
    """Mounts of a container, of all volumes or of some."""
    there = {volume["name"] for volume in volumes("", source)}
    return [
        {"name": name, "mountPath": path} | ({"readOnly": True} if name in _READ_ONLY else {})
        for name, path in ACCESS.items()
        if name in there and name in only
    ]


def _model(source: ModelSource) -> dict[str, Any]:
    if source.kind == "pvc":
        return {"name": "model", "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}
    if source.kind == "folder":
        return {"name": "model", "hostPath": {"path": source.path, "type": "Directory"}}
    return {"name": "models", "emptyDir": {}}
