"""A real redis-server on a free port, which tests stop, suspend and fill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path


class RedisServer:
    """One server process at one address over its lives.

    Args:
        folder: where it works and writes its log.
        password: that it asks for; empty asks for none.
        configuration: file that it reads first; the password is then there.
    """

    def __init__(self, folder: Path, *, password: str = "", configuration: Path | None = None) -> None:
        self.password = password
        self.port = _free_port()
        self._folder = folder
        self._configuration = configuration
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        told = [] if self._configuration is None else [str(self._configuration)]
        secret = ["--requirepass", self.password] if self.password and not told else []
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "redis-server", *told, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
                    "--appendonly", "no", "--dir", str(self._folder), *secret,
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 10
        while True:
            try:
                self.ask("PING")
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def kill(self) -> None:
        """End it as the kernel would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def suspend(self) -> None:
        """It keeps its connections and takes new ones, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ask(self, *words: str | bytes) -> bytes:
        """Answer to one command, as the protocol has it."""
        commands: list[Iterable[str | bytes]] = [["AUTH", self.password]] if self.password else []
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            answer = b""
            for command in [*commands, words]:
                parts = [part.encode() if isinstance(part, str) else part for part in command]
                framed = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
                connection.sendall(b"*%d\r\n%s" % (len(parts), framed))
                answer = connection.recv(65536)
        return answer

    def written(self) -> list[str]:
        """Keys of kLLM."""
        return sorted(word.decode() for word in self.ask("KEYS", "*").split(b"\r\n") if word.startswith(b"kllm"))

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
