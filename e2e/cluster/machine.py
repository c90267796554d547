"""What the cluster changes on the machine itself: a link, routes, control groups, kernel settings and empty folders."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import (
    CGROUP,
    HOST_ADDRESS,
    HOST_LINK,
    LINK_PREFIX,
    NODE_ADDRESS,
    NODE_LINK,
    POD_RANGE,
    SERVICE_RANGE,
    Layout,
)

_IP_SECONDS = 20.0
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_SECONDS = 20.0
_INHERITED = ("cpuset.cpus", "cpuset.mems")
# Unless told otherwise, the scheduler gives all pods together as much as one process beside them.
_SHARES = {"cpu.shares": "16384", "cpu.weight": "1600"}
# What a kubelet sets for the whole machine.
_KERNEL = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")


def join_networks(node: int) -> None:
    """Link the machine and the node, and route pods and Services over the link.

    Args:
        node: The process id of the node's first process.

    Raises:
        ClusterError: The link cannot be made.
    """
    inside = ["nsenter", f"--target={node}", "--net", "ip"]
    for command in (
        ["ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", NODE_LINK, "netns", str(node)],
        ["ip", "address", "add", f"{HOST_ADDRESS}/{LINK_PREFIX}", "dev", HOST_LINK],
        ["ip", "link", "set", HOST_LINK, "up"],
        [*inside, "address", "add", f"{NODE_ADDRESS}/{LINK_PREFIX}", "dev", NODE_LINK],
        [*inside, "link", "set", NODE_LINK, "up"],
        [*inside, "route", "add", "default", "via", HOST_ADDRESS],
        ["ip", "route", "add", POD_RANGE, "via", NODE_ADDRESS],
        ["ip", "route", "add", SERVICE_RANGE, "via", NODE_ADDRESS],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IP_SECONDS, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def part_networks() -> None:
    """Delete the link, and with it the routes."""
    subprocess.run(["ip", "link", "delete", HOST_LINK], capture_output=True, timeout=_IP_SECONDS, check=False)


def make_cgroups() -> None:
    """Make the control group under which the kubelet keeps its pods, in each hierarchy."""
    for hierarchy in hierarchies():
        group = hierarchy / CGROUP
        group.mkdir(exist_ok=True)
        for name in _INHERITED:
            if (hierarchy / name).exists():
                (group / name).write_text((hierarchy / name).read_text())
        for name, share in _SHARES.items():
            if (group / name).exists():
                (group / name).write_text(share)


def remove_cgroups() -> None:
    """Remove the pods' control groups, whose processes have ended.

    Raises:
        ClusterError: One of them is still in use.
    """
    deadline = time.monotonic() + _CGROUP_SECONDS
    while True:
        groups = [hierarchy / CGROUP for hierarchy in hierarchies() if (hierarchy / CGROUP).exists()]
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        if not any(group.exists() for group in groups):
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"control groups are still in use: {', '.join(map(str, groups))}")
        time.sleep(0.1)


def hierarchies() -> Iterator[Path]:
    """The roots of the control group hierarchies: one of version 2, or several of version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        yield _CGROUPS
        return
    for folder in sorted(_CGROUPS.iterdir()):
        if folder.is_dir() and not folder.is_symlink() and (folder / "cgroup.procs").exists():
            yield folder


def prepare(layout: Layout) -> None:
    """Note the settings that the kubelet will change, and make the folders that the node covers with its own."""
    made = [str(path) for path in layout.covered.values() if not path.exists()]
    before = {"kernel": {name: _kernel(name).read_text() for name in _KERNEL}, "made": made}
    _before(layout).write_text(json.dumps(before))
    for path in made:
        Path(path).mkdir(parents=True)


def restore(layout: Layout) -> None:
    """Set the settings as they were, and remove the folders that were made."""
    try:
        before = json.loads(_before(layout).read_text())
    except FileNotFoundError:
        return
    for name, value in before["kernel"].items():
        _kernel(name).write_text(value)
    for path in before["made"]:
        with contextlib.suppress(FileNotFoundError):
            Path(path).rmdir()


def remove_home(layout: Layout) -> None:
    """Remove the folder of the cluster.

    Raises:
        ClusterError: Something is mounted in it, whose files must not be deleted through it.
    """
    if not layout.home.exists():
        return
    inside = f"{layout.home}/"
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if found := [path for path in mounted if path.startswith(inside)]:
        raise ClusterError(f"unmount these first, then take the cluster down again: {' '.join(found)}")
    shutil.rmtree(layout.home)


def _before(layout: Layout) -> Path:
    return layout.settings / "machine.json"


def _kernel(name: str) -> Path:
    return Path("/proc/sys") / name
