"""What a cluster that was taken down would have left on the machine."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path

from e2e.cluster import machine
from e2e.cluster.layout import CGROUP, HOST_LINK, Layout

_LIST_SECONDS = 20.0
_RULES = "kube-proxy"


def traces(layout: Layout) -> list[str]:
    """Everything of a cluster that is on the machine, each said for a person; empty when there is nothing."""
    found = [f"folder {layout.home}"] if layout.home.exists() else []
    if HOST_LINK in {name for _, name in socket.if_nameindex()}:
        found.append(f"link {HOST_LINK}")
    found += [f"control group {root / CGROUP}" for root in machine.hierarchies() if (root / CGROUP).exists()]
    found += [
        f"mount {line.split()[1]}" for line in Path("/proc/self/mounts").read_text().splitlines() if _ours(layout, line)
    ]
    found += _processes(layout)
    if shutil.which("nft") is not None:
        listed = subprocess.run(
            ["nft", "list", "tables"], capture_output=True, text=True, timeout=_LIST_SECONDS, check=False
        )
        found += [f"packet filter {line}" for line in listed.stdout.splitlines() if _RULES in line]
    return found


def _processes(layout: Layout) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if _ours(layout, line):
                found.append(f"process {process.name}: {line[:100]}")
    return found


def _ours(layout: Layout, line: str) -> bool:
    """Whether a line names the cluster's folder or something in it; anyone's client may name the kubeconfig."""
    words = (word for word in line.split() if not word.endswith(str(layout.kubeconfig)))
    return any(word == str(layout.home) or f"{layout.home}/" in word for word in words)
