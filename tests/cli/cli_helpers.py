"""Runs `kllm` in a process of its own, with small programs in place of the engine and the router."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from substrate.substrate_helpers import MANIFEST, processes_with, wait_until

DRIVER = str(Path(__file__).with_name("driver.py"))
PATIENCE_SECONDS = 60.0
"""Far more than a start or an end takes where nothing else runs."""


class Machine:
    """A user with a runtime folder, a cache and a manifest of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Sockets are made in it, and their paths must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="kllm-test-"))
        self.runtime = self.temporary / "run"
        self.runtime.mkdir()
        self.manifest = folder / "service.yaml"
        self.manifest.write_text(MANIFEST)
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "COLUMNS": "200",
            "TMPDIR": str(self.temporary),
        }

    def close(self) -> None:
        """Remove what is not in its folder."""
        shutil.rmtree(self.temporary)

    def kllm(self, *arguments: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, DRIVER, *arguments],
            env={**self.environment, **variables},
            cwd=self.folder,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @contextlib.contextmanager
    def up(self, *arguments: str, **variables: str) -> Iterator[Up]:
        """`kllm up` on a free port, killed at the end if it still runs."""
        command = [sys.executable, DRIVER, "up", "-f", str(self.manifest), "--port", "0", "--json", *arguments]
        with subprocess.Popen(
            command,
            env={**self.environment, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            running = Up(process)
            try:
                yield running
            finally:
                process.kill()
                running.close()

    def pool(self, role: str) -> dict:
        """What the control loop of the service says of a pool."""
        file = self.runtime / "kllm" / "chat" / "control.json"
        return json.loads(file.read_text())["pools"][role] if file.exists() else {}

    def left(self) -> list[int]:
        """Living processes that were started for this machine."""
        return processes_with("XDG_RUNTIME_DIR", str(self.runtime))


class Up:
    """A running `kllm up --json`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict] = []
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=read) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def wait_for(self, event: str, **fields: object) -> dict:
        """Wait for an event."""
        wanted = {"event": event, **fields}

        def found() -> list[dict]:
            return [seen for seen in list(self.events) if wanted.items() <= seen.items()]

        wait_until(found, seconds=PATIENCE_SECONDS, what=f"{wanted}; stderr: {self.errors}")
        return found()[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, *, seconds: float = PATIENCE_SECONDS) -> tuple[int, str, float]:
        """Wait for its end; exit status, standard error, and seconds that it took."""
        began = time.monotonic()
        status = self.process.wait(timeout=seconds)
        took = time.monotonic() - began
        self.close()
        return status, "".join(self.errors), took

    def close(self) -> None:
        """Read what is left."""
        for reader in self._readers:
            reader.join(timeout=10)

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
