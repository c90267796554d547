"""The cluster that the tests run on: the one of KUBECONFIG, kind's, or the repository's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries
from e2e.cluster.cluster import Cluster
from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.talk import say
from e2e.host import HostEnvironment, write_image
from e2e.values import chart_values

_KIND = "kllm-e2e"
_KIND_PREFIX = "/kllm-host"
_KIND_SECONDS = 900.0
_LOOK_SECONDS = 20.0


@dataclass(frozen=True)
class Target:
    """A cluster that is up.

    Attributes:
        kubeconfig: The way to it.
        kubectl: The program.
        helm: The program.
        values: The chart's values under which kLLM's pods run there.
        own: The cluster itself if it is the repository's own, whose components tests may stop; None otherwise.
    """

    kubeconfig: Path
    kubectl: Path
    helm: Path
    values: dict[str, Any]
    own: Cluster | None = None


def find(folder: Path) -> Target:
    """Bring up the cluster to test on, with kLLM's programs ready for its pods.

    Args:
        folder: Where image files may be written.

    Raises:
        ClusterError: There is no cluster and none can be had.
    """
    cluster = Cluster(Layout.of_environment())
    given = os.environ.get("KUBECONFIG")
    if given and Path(given) != cluster.layout.kubeconfig:
        return _given(Path(given))
    if _has_kind():
        return _kind(cluster.layout, folder)
    cluster.up()
    image = folder / "host.tar"
    write_image(image)
    cluster.load(image)
    return Target(
        kubeconfig=cluster.layout.kubeconfig,
        kubectl=cluster.programs / "kubectl",
        helm=cluster.programs / "helm",
        values=chart_values(HostEnvironment.of_this_process()),
        own=cluster,
    )


def kind_settings(host: HostEnvironment) -> dict[str, Any]:
    """What kind is told: one node that has the machine's folders, each below the prefix."""
    mounts = [
        {"hostPath": str(folder), "containerPath": f"{host.prefix}{folder}", "readOnly": True}
        for folder in host.folders
    ]
    return {
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kind": "Cluster",
        "nodes": [{"role": "control-plane", "extraMounts": mounts}],
    }


def _given(kubeconfig: Path) -> Target:
    values = os.environ.get("KLLM_E2E_VALUES")
    if not values:
        raise ClusterError(
            "with a KUBECONFIG of your own set KLLM_E2E_VALUES to a values file that names images it can pull"
        )
    loaded = yaml.safe_load(Path(values).read_text()) or {}
    return Target(kubeconfig=kubeconfig, kubectl=_on_path("kubectl"), helm=_on_path("helm"), values=loaded)


def _has_kind() -> bool:
    """Whether kind can make a cluster here."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    try:
        return (
            subprocess.run(["docker", "info"], capture_output=True, timeout=_LOOK_SECONDS, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def _kind(layout: Layout, folder: Path) -> Target:
    host = HostEnvironment.of_this_process(prefix=_KIND_PREFIX)
    kubeconfig = layout.cache / "kind.kubeconfig"
    kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    if _KIND not in _run_kind("get", "clusters").split():
        say("making a cluster with kind")
        settings = folder / "kind.yaml"
        settings.write_text(json.dumps(kind_settings(host)))
        _run_kind("create", "cluster", "--name", _KIND, "--config", str(settings), "--wait", "180s")
    kubeconfig.write_text(_run_kind("get", "kubeconfig", "--name", _KIND))
    image = folder / "host.tar"
    write_image(image)
    _run_kind("load", "image-archive", str(image), "--name", _KIND)
    programs = binaries.ensure(layout, only=("kubectl", "helm"))
    return Target(
        kubeconfig=kubeconfig, kubectl=programs / "kubectl", helm=programs / "helm", values=chart_values(host)
    )


def _run_kind(*arguments: str) -> str:
    done = subprocess.run(["kind", *arguments], capture_output=True, text=True, timeout=_KIND_SECONDS, check=False)
    if done.returncode != 0:
        raise ClusterError(f"kind {' '.join(arguments[:2])} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _on_path(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"with a KUBECONFIG of your own, {name} must be on PATH")
    return Path(found)
