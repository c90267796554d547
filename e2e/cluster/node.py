"""The first process of the node's namespaces: it starts and ends the components and reaps what they leave.

python -m e2e.cluster.node HOME

The node has process, mount and network namespaces of its own. So its ports, mounts, links and packet filter rules are
not the machine's, and when this process ends the kernel ends all others and takes the rest away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster.layout import Layout

_REQUEST_BYTES = 1 << 20
# The API server takes a minute to end while anyone watches.
_STOP_SECONDS = 5.0
_MOUNT_SECONDS = 20.0


@dataclass
class Child:
    """A component that was started.

    Attributes:
        pid: Its process id inside the node.
        code: Its exit code, negative for a signal; None while it runs.
        ended: Set once it has ended.
    """

    pid: int
    code: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Node:
    """The components by name, and the orders about them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}

    def reap(self) -> None:
        """Take the exit codes of all processes that ended, the orphans' too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for child in self._children.values():
                    if child.pid == pid:
                        child.code = os.waitstatus_to_exitcode(status)
                        child.ended.set()

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order and return the answer; `error` in it says what went wrong."""
        match order.get("action"):
            case "start":
                return self._start(str(order["name"]), [str(word) for word in order["command"]])
            case "stop":
                return await self._stop(str(order["name"]), kill=bool(order.get("kill")))
            case "state":
                return {
                    "children": {name: {"pid": child.pid, "code": child.code} for name, child in self._children.items()}
                }
            case action:
                return {"error": f"no such action: {action}"}

    def _start(self, name: str, command: list[str]) -> dict[str, Any]:
        child = self._children.get(name)
        if child is not None and child.code is None:
            return {"pid": child.pid}
        log = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            pid = os.posix_spawnp(
                command[0],
                command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            return {"error": f"{name} cannot be started: {error}"}
        finally:
            os.close(log)
        self._children[name] = Child(pid)
        return {"pid": pid}

    async def _stop(self, name: str, *, kill: bool) -> dict[str, Any]:
        child = self._children.get(name)
        if child is None:
            return {"error": f"{name} was not started"}
        if child.code is None:
            os.kill(child.pid, signal.SIGKILL if kill else signal.SIGTERM)
            try:
                await asyncio.wait_for(child.ended.wait(), _STOP_SECONDS)
            except TimeoutError:
                os.kill(child.pid, signal.SIGKILL)
                await child.ended.wait()
        return {"code": child.code}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection: a line of JSON in, a line of JSON out."""
        try:
            order = json.loads(await reader.readline())
            writer.write(json.dumps(await self.obey(order)).encode() + b"\n")
            await writer.drain()
        except (ValueError, KeyError, OSError) as error:
            sys.stderr.write(f"order not understood: {error}\n")
        finally:
            writer.close()


def prepare(layout: Layout) -> None:
    """Lay the node's own folders over the machine's that the components write to."""
    for command in (
        ["mount", "--make-rshared", "/"],
        ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
        *(["mount", "--bind", str(own), str(covered)] for own, covered in layout.covered.items()),
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True, timeout=_MOUNT_SECONDS)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")


async def run(layout: Layout) -> None:
    """Serve orders until killed."""
    node = Node(layout.logs)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, node.reap)
    layout.control.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(node.serve, layout.control, limit=_REQUEST_BYTES)
    layout.control.chmod(0o600)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Be the node of the cluster whose home is the first argument."""
    layout = Layout(home=Path(sys.argv[1]), cache=Path(sys.argv[1]))
    os.umask(0o022)
    prepare(layout)
    asyncio.run(run(layout))


if __name__ == "__main__":
    main()
