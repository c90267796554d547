"""The chart's values for the tests: every program comes from the machine's environment."""

from __future__ import annotations

from typing import Any

from e2e.host import IMAGE, HostEnvironment


def chart_values(host: HostEnvironment) -> dict[str, Any]:
    """Values under which the chart's pods run the machine's environment.

    Args:
        host: What the pods see of the machine.
    """
    repository, tag = IMAGE.split(":")
    image = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    return {
        "crds": {"command": host.command("kllm_operator.crds")},
        "operator": {
            "image": image,
            "command": host.command("kllm_operator.main"),
            "extraVolumes": host.volumes(),
            "extraVolumeMounts": host.mounts(),
        },
        "engine": {
            "image": image,
            "command": host.command("kllm_engine.main"),
            "template": _template(host, container="engine"),
        },
        "router": {
            "image": image,
            "command": host.command("kllm_router.main"),
            "template": _template(host, container="router"),
        },
    }


def _template(host: HostEnvironment, *, container: str) -> dict[str, Any]:
    """A pod template that mounts the machine's folders into the container and into the one that fetches the model."""
    return {
        "spec": {
            "volumes": host.volumes(),
            "initContainers": [{"name": "model", "volumeMounts": host.mounts()}],
            "containers": [{"name": container, "volumeMounts": host.mounts()}],
        }
    }
