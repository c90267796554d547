"""What a test does with a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config

from e2e.targets import Target

_CALL_SECONDS = 60.0
_HELM_SECONDS = 300.0
_FORWARD_SECONDS = 20.0
_LOOK_SECONDS = 0.2
_COLLECT_SECONDS = 30.0
_LOG_LINES = 5000


class CommandError(AssertionError):
    """A command on the cluster failed; the message is what it said."""


class Kube:
    """The cluster through kubectl, helm and the Python client."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # The plugin finds kubectl on the path.
        path = f"{target.kubectl.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._environment = {**os.environ, "KUBECONFIG": str(target.kubeconfig), "PATH": path}

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = _CALL_SECONDS) -> str:
        """Run kubectl and return what it printed.

        Args:
            arguments: Its arguments.
            given: Its standard input.
            seconds: How long it may take.

        Raises:
            CommandError: It failed.
        """
        return self._run([str(self.target.kubectl), *arguments], given=given, seconds=seconds)

    def helm(self, *arguments: str, given: str | None = None, seconds: float = _HELM_SECONDS) -> str:
        """Run helm and return what it printed.

        Args:
            arguments: Its arguments.
            given: Its standard input, such as values for `--values -`.
            seconds: How long it may take.

        Raises:
            CommandError: It failed.
        """
        return self._run([str(self.target.helm), *arguments], given=given, seconds=seconds)

    def plugin(self, *arguments: str, seconds: float = _CALL_SECONDS) -> str:
        """Run `kubectl kllm` and return what it printed.

        Args:
            arguments: Its arguments.
            seconds: How long it may take.

        Raises:
            CommandError: It failed.
        """
        return self._run([sys.executable, "-m", "kllm.kubectl.main", *arguments], given=None, seconds=seconds)

    def apply(self, *documents: Mapping[str, Any], namespace: str = "default") -> None:
        """Apply documents, server-side."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "--server-side", "--namespace", namespace, "--filename", "-", given=json.dumps(listed))

    def get(self, kind: str, name: str, *, namespace: str = "default") -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = json.loads(
            self.kubectl("get", kind, name, "--namespace", namespace, "--output", "json")
        )
        return found

    def list(self, kind: str, *, namespace: str = "default", labels: str = "") -> list[dict[str, Any]]:
        """The objects of a namespace that a label selector finds."""
        found = self.kubectl("get", kind, "--namespace", namespace, "--selector", labels, "--output", "json")
        items: list[dict[str, Any]] = json.loads(found)["items"]
        return items

    def wait(self, what: str, condition: str, *, namespace: str = "default", seconds: float = _CALL_SECONDS) -> None:
        """Wait for a condition.

        Args:
            what: KIND/NAME.
            condition: As `kubectl wait --for` takes it.
            namespace: The object's namespace.
            seconds: How long.

        Raises:
            CommandError: It did not come to be.
        """
        self.kubectl(
            *("wait", what, f"--for={condition}", "--namespace", namespace, f"--timeout={seconds:.0f}s"),
            seconds=seconds + _CALL_SECONDS,
        )

    def delete(self, what: str, *, namespace: str = "default", seconds: float = _CALL_SECONDS) -> None:
        """Delete KIND/NAME and wait until it is gone; it may be gone already."""
        self.kubectl("delete", what, "--namespace", namespace, "--ignore-not-found", seconds=seconds)

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace for one test, deleted with all that is in it."""
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.delete(f"namespace/{name}", seconds=_HELM_SECONDS)

    def namespaces(self, prefix: str) -> tuple[str, ...]:
        """The names of the namespaces that begin so."""
        names = self.kubectl("get", "namespaces", "--output", "jsonpath={.items[*].metadata.name}").split()
        return tuple(name for name in names if name.startswith(prefix))

    @contextmanager
    def reach(self, service: str, port: int, *, namespace: str = "default") -> Iterator[str]:
        """The address HOST:PORT at which the test reaches a Service.

        On the repository's own cluster it is the Service itself, load balancing included; elsewhere one of its pods.

        Raises:
            CommandError: The port cannot be forwarded.
        """
        if self.target.own is not None:
            yield f"{self.get('service', service, namespace=namespace)['spec']['clusterIP']}:{port}"
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            local = free.getsockname()[1]
        forward = subprocess.Popen(
            [
                *(str(self.target.kubectl), "port-forward", f"service/{service}", f"{local}:{port}"),
                *("--namespace", namespace),
            ],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_port(local, forward)
            yield f"127.0.0.1:{local}"
        finally:
            forward.terminate()
            forward.wait(timeout=_FORWARD_SECONDS)

    async def api(self) -> client.ApiClient:
        """A client of the API server; close it in the end."""
        made: client.ApiClient = await config.new_client_from_config(  # type: ignore[no-untyped-call]
            config_file=str(self.target.kubeconfig)
        )
        return made

    def collect(self, folder: Path, namespaces: Sequence[str]) -> None:
        """Write objects, events and logs of namespaces into a folder; what cannot be had is left out."""
        folder.mkdir(parents=True, exist_ok=True)
        for namespace in namespaces:
            here = ("--namespace", namespace)
            self._keep(folder / f"{namespace}-objects.yaml", "get", "all,llm,pp,dp", *here, "--output", "yaml")
            self._keep(folder / f"{namespace}-events.txt", "get", "events", *here, "--sort-by=.lastTimestamp")
            self._keep(folder / f"{namespace}-pods.txt", "describe", "pods", *here)
            with contextlib.suppress(CommandError, subprocess.TimeoutExpired):
                for pod in self.list("pods", namespace=namespace):
                    name = pod["metadata"]["name"]
                    logs = ("logs", name, *here, "--all-containers", "--prefix", f"--tail={_LOG_LINES}")
                    self._keep(folder / f"{namespace}-{name}.log", *logs)

    def _keep(self, path: Path, *arguments: str) -> None:
        with contextlib.suppress(CommandError, subprocess.TimeoutExpired):
            path.write_text(self.kubectl(*arguments, seconds=_COLLECT_SECONDS))

    def _run(self, command: Sequence[str], *, given: str | None, seconds: float) -> str:
        done = subprocess.run(
            command,
            env=self._environment,
            input=given,
            stdin=None if given is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise CommandError(
                f"{Path(command[0]).name} {' '.join(command[1:])}: {done.stderr.strip()}{done.stdout[-500:]}"
            )
        return done.stdout


def _wait_for_port(port: int, forward: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _FORWARD_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=_LOOK_SECONDS):
            return
        if forward.poll() is not None or time.monotonic() > deadline:
            raise CommandError(f"the port cannot be forwarded: {' '.join(map(str, forward.args))}")  # type: ignore[arg-type]
        time.sleep(_LOOK_SECONDS)
