"""The Debian packages that the cluster runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.exceptions import ClusterError
from e2e.cluster.talk import say

# What has to be there, and the package that brings it.
NODE = {
    "/usr/bin/etcd": "etcd-server",
    "/usr/bin/containerd": "containerd",
    "/usr/bin/ctr": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/iptables": "iptables",
    "/usr/share/doc/busybox-static": "busybox-static",
    "/usr/bin/openssl": "openssl",
    "/usr/bin/unshare": "util-linux",
    "/usr/sbin/ip": "iproute2",
}
IMAGES = {"/usr/bin/buildah": "buildah", "/usr/sbin/debootstrap": "debootstrap"}
_INSTALL_SECONDS = 900.0
_POLICY = Path("/usr/sbin/policy-rc.d")


def ensure(wanted: Mapping[str, str]) -> None:
    """Install the packages whose files are missing; their services are not started.

    Args:
        wanted: The package by a file that it brings.

    Raises:
        ClusterError: There is no apt-get, or it failed.
    """
    missing = sorted({package for path, package in wanted.items() if not Path(path).exists()})
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install your distribution's counterparts of Debian's {names}")
    say(f"installing Debian's {names}")
    with _no_services():
        _apt("update", "-qq")
        _apt("install", "--yes", "--no-install-recommends", "-qq", *missing)
    for path, package in wanted.items():
        if not Path(path).exists():
            raise ClusterError(f"{package} is installed and yet there is no {path}")


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting an etcd or containerd of the machine's own."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def _apt(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_INSTALL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"apt-get {' '.join(arguments)} failed:\n{done.stdout[-4000:]}")
