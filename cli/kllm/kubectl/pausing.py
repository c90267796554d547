"""`kubectl kllm pause` and `resume`: let the operator observe a service and take no step."""

from __future__ import annotations

from kllm.kubectl.kubectl import SERVICES, Kubectl
from kllm_core import labels


def run(kubectl: Kubectl, name: str, *, pause: bool) -> int:
    """Returns 0.

    Raises:
        PluginError: it cannot be done.
    """
    kubectl.annotate(SERVICES, name, f"{labels.PAUSED}=true" if pause else f"{labels.PAUSED}-")
    print(f"inferenceservice.kllm.io/{name} {'paused' if pause else 'resumed'}")
    return 0
