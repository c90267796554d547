"""Kubernetes, helm and CoreDNS, built from Go modules and kept in a cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import GO_MODULE, Layout
from e2e.cluster.talk import say

_BUILD_SECONDS = 3600.0
_DOWNLOAD_SECONDS = 1800.0
_KUBERNETES = "k8s.io/kubernetes"
_HELM = "helm.sh/helm/v3"


@dataclass(frozen=True)
class Program:
    """A program that is built here.

    Attributes:
        name: What its file is called.
        package: The Go package of its main function.
    """

    name: str
    package: str


PROGRAMS = (
    *(
        Program(name, f"{_KUBERNETES}/cmd/{name}")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
    ),
    Program("helm", f"{_HELM}/cmd/helm"),
    Program("coredns", "./coredns"),
)


def folder(layout: Layout) -> Path:
    """Where the programs of the present go.mod lie, or will lie."""
    seen = hashlib.sha256(_linker_flags().encode())
    for path in (GO_MODULE / "go.mod", GO_MODULE / "go.sum", GO_MODULE / "coredns" / "main.go"):
        seen.update(path.read_bytes())
    return layout.cache / "bin" / seen.hexdigest()[:16]


def ensure(layout: Layout, *, only: Collection[str] = ()) -> Path:
    """Build what the cache lacks and return the folder of the programs.

    Args:
        layout: The cluster's folders.
        only: Names of programs; empty for all of them.

    Raises:
        ClusterError: Go is missing or too old, or a build failed.
    """
    unknown = set(only) - {program.name for program in PROGRAMS}
    if unknown:
        raise ClusterError(f"no such program: {', '.join(sorted(unknown))}")
    target = folder(layout)
    missing = [
        program
        for program in PROGRAMS
        if (not only or program.name in only) and not os.access(target / program.name, os.X_OK)
    ]
    if not missing:
        return target
    if shutil.which("go") is None:
        raise ClusterError("the cluster's programs are built with Go 1.24 or newer, and there is no `go` on PATH")
    target.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    say("downloading Go modules")
    _go(["mod", "download"], seconds=_DOWNLOAD_SECONDS)
    for number, program in enumerate(missing, start=1):
        say(f"building {program.name} ({number} of {len(missing)})")
        _build(program, target)
    say(f"built {len(missing)} programs in {time.monotonic() - began:.0f} s")
    return target


def _build(program: Program, target: Path) -> None:
    unfinished = target / f".{program.name}.{os.getpid()}"
    try:
        _go(
            ["build", "-trimpath", "-ldflags", _linker_flags(), "-o", str(unfinished), program.package],
            seconds=_BUILD_SECONDS,
        )
        unfinished.rename(target / program.name)
    finally:
        unfinished.unlink(missing_ok=True)


def _linker_flags() -> str:
    """Flags that leave out symbols and put in the versions, which charts and clients compare."""
    kubernetes, helm = _version(_KUBERNETES), _version(_HELM)
    major, minor = kubernetes.removeprefix("v").split(".")[:2]
    values = {
        "k8s.io/component-base/version.gitVersion": kubernetes,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": kubernetes,
        f"{_HELM}/internal/version.version": helm,
        f"{_HELM}/pkg/chartutil.k8sVersionMajor": major,
        f"{_HELM}/pkg/chartutil.k8sVersionMinor": minor,
    }
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in values.items())])


def _version(module: str) -> str:
    found = re.search(rf"^\t{re.escape(module)} (v\S+)$", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise ClusterError(f"{GO_MODULE / 'go.mod'} does not require {module}")
    return found[1]


def _go(arguments: list[str], *, seconds: float) -> None:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    done = subprocess.run(
        ["go", *arguments],
        cwd=GO_MODULE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"go {' '.join(arguments[:2])} failed:\n{done.stdout[-4000:]}")
