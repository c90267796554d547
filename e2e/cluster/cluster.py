"""Bringing the cluster up and taking it down."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import binaries, components, images, machine, packages, settings
from e2e.cluster.exceptions import ClusterError
from e2e.cluster.layout import NODE_NAME, Layout
from e2e.cluster.orders import NodeOrders
from e2e.cluster.talk import say
from e2e.cluster.traces import traces

_READY_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_CALL_SECONDS = 30.0
_REPOSITORY = Path(__file__).parents[2]
_CLUSTER_SECONDS = 3600.0
_ACCELERATOR = "nvidia.com/gpu"
_ACCELERATORS = 16


@dataclass(frozen=True)
class Cluster:
    """The cluster of this machine; there is one at most.

    Attributes:
        layout: Its folders.
    """

    layout: Layout

    @property
    def programs(self) -> Path:
        """The folder of kubectl, helm and the others."""
        return binaries.folder(self.layout)

    @property
    def node(self) -> NodeOrders:
        """Orders to its node."""
        return NodeOrders(self.layout.control)

    def runs(self) -> bool:
        """Whether its node is there, whatever state the components are in."""
        return self.node.pid() is not None

    def up(self) -> None:
        """Bring it up; of one that is up already only the components that do not run are started.

        Raises:
            ClusterError: This is not root, something is missing, or a component does not come up.
        """
        _require_root()
        with self._alone():
            packages.ensure(packages.NODE)
            programs = binaries.ensure(self.layout)
            began = time.monotonic()
            try:
                if not (self.runs() and self.layout.kubeconfig.exists()):
                    self._clear()
                    self._begin(programs)
                self._complete(programs)
            except BaseException:
                say(f"did not come up; its logs are in {self.layout.logs}, and `make cluster-down` clears it away")
                raise
            say(f"up after {time.monotonic() - began:.1f} s")
            say(f"export KUBECONFIG={self.layout.kubeconfig} PATH={programs}:$PATH")

    def down(self) -> None:
        """Take it down and remove all that it left; the programs in the cache stay.

        Raises:
            ClusterError: This is not root, or something cannot be removed.
        """
        _require_root()
        with self._alone():
            began = time.monotonic()
            self._clear()
            if left := traces(self.layout):
                raise ClusterError("still there: " + "; ".join(left))
            say(f"down after {time.monotonic() - began:.1f} s")

    def start(self, name: str) -> None:
        """Start one component that was stopped.

        Raises:
            ClusterError: There is no such component, or the cluster does not run.
        """
        self.node.start(name, self._command(name))

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Stop one component and leave the others alone.

        Args:
            name: The component.
            kill: Give it no time to end by itself.

        Raises:
            ClusterError: There is no such component, or the cluster does not run.
        """
        self._command(name)
        self.node.stop(name, kill=kill)

    def wait_for_api(self) -> None:
        """Wait until the API server answers that it is ready.

        Raises:
            ClusterError: It takes longer than two minutes, or a component ended.
        """
        self._wait("the API server", lambda: self.kubectl("get", "--raw=/readyz").returncode == 0)

    def offer(self, resource: str, count: int) -> None:
        """Let the node say that it has so many accelerators, for which pods then ask; they get none.

        A kubelet that starts anew forgets them.

        Args:
            resource: Their resource name.
            count: How many.

        Raises:
            ClusterError: The API server does not take it.
        """
        patch = json.dumps({"status": {"capacity": {resource: str(count)}, "allocatable": {resource: str(count)}}})
        done = self.kubectl("patch", "node", NODE_NAME, "--subresource=status", "--type=merge", f"--patch={patch}")
        if done.returncode != 0:
            raise ClusterError(f"{resource} cannot be offered: {done.stderr.strip()}")

    def load(self, image: Path) -> None:
        """Import an image file."""
        images.load(self.layout, image)

    def kubectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; its exit code tells whether it worked."""
        return subprocess.run(
            [str(self.programs / "kubectl"), f"--kubeconfig={self.layout.kubeconfig}", *arguments],
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS,
            check=False,
        )

    def _command(self, name: str) -> list[str]:
        commands = components.commands(self.layout, self.programs)
        if name not in commands:
            raise ClusterError(f"no such component: {name}; there are {', '.join(commands)}")
        return commands[name]

    def _begin(self, programs: Path) -> None:
        """Make everything anew, up to an API server that has written its certificate."""
        say("starting the node, etcd and the API server")
        tokens = settings.write_before_the_api(self.layout)
        machine.prepare(self.layout)
        machine.make_cgroups()
        self._start_node()
        commands = components.commands(self.layout, programs)
        for name in (components.ETCD, components.API):
            self.node.start(name, commands[name])
        self._wait("the API server's certificate", self.layout.certificate.exists)
        settings.write_kubeconfigs(self.layout, tokens)

    def _complete(self, programs: Path) -> None:
        """Start what does not run and wait until pods can be made."""
        rest = components.commands(self.layout, programs)
        for name in (components.ETCD, components.API, components.CONTAINERD):
            self.node.start(name, rest.pop(name))
        self.wait_for_api()
        say("starting the kubelet and the controllers")
        pause = self.layout.home / "pause.tar"
        images.write_busybox(pause, settings.PAUSE, command=["/bin/sleep", "2147483647"])
        self._wait("containerd to take an image", lambda: self._takes(pause))
        for name, command in rest.items():
            self.node.start(name, command)
        self._wait("the node to be ready", self._node_is_ready)
        self._wait("the default service account", self._has_service_account)
        self.offer(_ACCELERATOR, _ACCELERATORS)

    def _start_node(self) -> None:
        inside = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.layout.home), "LANG": "C.UTF-8"}
        with (self.layout.logs / "node.log").open("ab") as log:
            subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--net"),
                    *("--mount", "--propagation=private", "--mount-proc"),
                    *(sys.executable, "-m", "e2e.cluster.node", str(self.layout.home)),
                ],
                cwd="/",
                env={**inside, "PYTHONPATH": str(_REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait("the node", self.runs)
        node = self.node.pid()
        if node is None:
            raise ClusterError(f"the node ended; see {self.layout.logs / 'node.log'}")
        machine.join_networks(node)

    def _takes(self, image: Path) -> bool:
        try:
            self.load(image)
        except ClusterError:
            return False
        return True

    def _node_is_ready(self) -> bool:
        ready = '{.status.conditions[?(@.type=="Ready")].status}'
        done = self.kubectl("get", "node", NODE_NAME, "--output", f"jsonpath={ready}")
        return done.returncode == 0 and done.stdout == "True"

    def _has_service_account(self) -> bool:
        return self.kubectl("get", "serviceaccount", "default").returncode == 0

    def _wait(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not there():
            if self.runs():
                self._complain_of_ended()
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {_READY_SECONDS:.0f} s for {what}; see {self.layout.logs}")
            time.sleep(_LOOK_SECONDS)

    def _complain_of_ended(self) -> None:
        for name, child in self.node.state().items():
            if child.code is not None:
                log = self.layout.logs / f"{name}.log"
                last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise ClusterError(f"{name} ended with {child.code}; the end of {log}:\n{last}")

    def _clear(self) -> None:
        self.node.end()
        machine.part_networks()
        machine.remove_cgroups()
        machine.restore(self.layout)
        machine.remove_home(self.layout)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep two commands from building or changing the cluster at a time."""
        self.layout.cache.mkdir(parents=True, exist_ok=True)
        with (self.layout.cache / "lock").open("w") as lock:
            deadline = time.monotonic() + _CLUSTER_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClusterError("another command is at work on the cluster for an hour already") from None
                    time.sleep(_LOOK_SECONDS)
                else:
                    break
            yield


def _require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "the cluster needs root for namespaces, control groups and mounts: use sudo, or a KUBECONFIG of your own"
        )
