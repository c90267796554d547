"""Orders to the node, from outside its namespaces."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.exceptions import ClusterError

_ANSWER_SECONDS = 60.0
_END_SECONDS = 60.0


@dataclass(frozen=True)
class ChildState:
    """What the node says about one component.

    Attributes:
        pid: Its process id inside the node.
        code: Its exit code; None while it runs.
    """

    pid: int
    code: int | None


class NodeOrders:
    """The node behind a control socket."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def pid(self) -> int | None:
        """The process id, outside, of the node's first process; None if there is no node."""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self._control))
            except (FileNotFoundError, ConnectionRefusedError):
                return None
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a component unless it runs.

        Raises:
            ClusterError: It cannot be started.
        """
        self._order({"action": "start", "name": name, "command": list(command)})

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Stop a component and wait until it has ended.

        Args:
            name: The component.
            kill: Give it no time to end by itself.

        Raises:
            ClusterError: It was never started.
        """
        self._order({"action": "stop", "name": name, "kill": kill})

    def state(self) -> Mapping[str, ChildState]:
        """The components that were started, by name."""
        children = self._order({"action": "state"})["children"]
        return {name: ChildState(**child) for name, child in children.items()}

    def end(self) -> None:
        """End the node's first process and with it all others; returns once they are gone.

        Raises:
            ClusterError: They are still there a minute later.
        """
        pid = self.pid()
        if pid is None:
            return
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended, _, _ = select.select([descriptor], [], [], _END_SECONDS)
        finally:
            os.close(descriptor)
        if not ended:
            raise ClusterError(f"the node's processes do not end; process {pid} is their first")

    def _order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            try:
                connection.connect(str(self._control))
                connection.sendall(json.dumps(order).encode() + b"\n")
                line = connection.makefile("rb").readline()
            except OSError as error:
                raise ClusterError(f"the cluster does not run here, see `make cluster`: {error}") from error
        if not line:
            raise ClusterError(f"the node did not answer; see {self._control.parent / 'log'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClusterError(str(answer["error"]))
        return answer
