"""Pods of a test's own, beside those of kLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from e2e.host import IMAGE, HostEnvironment

USER = 65532
_TMP = "/tmp"


def host_pod(name: str, command: Sequence[str], **container: Any) -> dict[str, Any]:
    """A pod without rights that runs the machine's Python.

    Args:
        name: of the pod, and its label `app`.
        command: arguments of the interpreter.
        container: other fields of its container.
    """
    host = HostEnvironment.of_this_process()
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [*host.volumes(), {"name": "tmp", "emptyDir": {}}],
            "containers": [
                {
                    "name": "main",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": [str(host.python), *command],
                    "workingDir": _TMP,
                    "env": [{"name": "HOME", "value": _TMP}, {"name": "USER", "value": "kllm"}],
                    "volumeMounts": [*host.mounts(), {"name": "tmp", "mountPath": _TMP}],
                    "securityContext": security,
                    **container,
                }
            ],
        },
    }
