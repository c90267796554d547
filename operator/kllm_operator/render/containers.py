"""What all containers that the operator renders have in common: they may do next to nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

USER = 65532
"""Neither root nor anyone else on the node."""


def pod_security() -> dict[str, Any]:
    """Security context of a pod."""
    return {
        "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip


def container(
    name: str, *, image: str, pull_policy: str, command: Sequence[str], arguments: Sequence[str]
) -> dict[str, Any]:
    """A container that writes nothing but its mounts and its last words."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": list(command),
        "args": list(arguments),
        # Without it the reason of a failure is in logs only, which are gone with the pod.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
