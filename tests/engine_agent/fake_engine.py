"""A zygote whose servers look like SGLang to an agent: process tree, HTTP readiness and plugin messages, no model.

Engine arguments that it understands besides SGLang's: `fake-hello` (JSON that overrides fields of the hello),
`fake-exit` (exit status before it is ready), `fake-silent` (no hello ever), `fake-switch` (JSON answer to a role
switch), `fake-no-hello` (no hello after it).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import setproctitle

from kllm_core.lifetime import die_with_parent
from kllm_engine import messages
from kllm_engine.start.zygote import serve


def control_path(agent_socket: str) -> str:
    """Where a fake scheduler takes orders."""
    return agent_socket.replace(".plugin.sock", ".orders.sock")


class FakeRecipe:
    """Servers of this module."""

    def prepare(self) -> None:
        """Import nothing, but take until a file is gone, or fail."""
        while os.path.exists(os.environ.get("FAKE_ZYGOTE_HOLD", "")):  # noqa: PTH110
            time.sleep(0.02)
        if "FAKE_ZYGOTE_FAILS" in os.environ:
            raise RuntimeError("no such module")

    def run(self, arguments: list[str]) -> None:
        """Be a server."""
        options = _options(arguments)
        if "fake-exit" in options:
            sys.stdout.write("fake engine: no room for weights\n")
            raise SystemExit(int(options["fake-exit"]))
        once = options.get("fake-exit-once")
        if once is not None and not os.path.exists(once):  # noqa: PTH110
            open(once, "x").close()  # noqa: PTH123
            raise SystemExit(1)
        _child("sglang::detokenizer", _sleep_forever)
        _child("sglang::scheduler", lambda: FakeScheduler(options).run())
        _serve_http(options)


class FakeScheduler:
    """Says what a plugin says, and does as it is told."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._path = os.environ[messages.AGENT_SOCKET_VARIABLE]
        self._hung_since: float | None = None
        self._load: dict[str, object] | None = None
        self._silent = "fake-silent" in options

    def run(self) -> None:
        """Take orders until killed."""
        orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        orders.bind(control_path(self._path))
        self._link.connect(self._path)
        if not self._silent:
            self._send(self._hello())
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            self._obey(json.loads(orders.recv(65536)))

    def _obey(self, order: dict[str, object]) -> None:
        if order["do"] == "hang":
            self._hung_since = time.monotonic()
        elif order["do"] == "silence":
            self._silent = bool(order["on"])
        elif order["do"] == "load":
            self._load = order["fields"]
        elif order["do"] == "mute-load":
            self._load = None
        elif order["do"] == "switch":
            self._options["disaggregation-mode"] = str(order["role"])
            self._send(self._hello())
        elif order["do"] == "mute-http":
            Path(f"{self._path}.mute").touch()
        else:
            self._send(messages.Request(pid=os.getpid(), now=time.monotonic(), **order["fields"]))

    def _hello(self) -> messages.Hello:
        fields = {
            "pid": os.getpid(),
            "now": time.monotonic(),
            "engine_version": "0.5.21",
            "role": self._options["disaggregation-mode"],
            "page_size": int(self._options["page-size"]),
            "kv_type": "float32",
            "optimistic_attempts": 1_000_000,
            "binding_reason": "",
            "max_total_num_tokens": 16384,
            "max_running_requests": 16,
            "context_tokens": 8192,
            "request_tokens": 8192,
            "parked_limit_tokens": 8192,
            "hooks_installed": ["Scheduler.event_loop"],
            "hooks_missing": [],
            "problems": [],
        }
        return messages.Hello(**(fields | json.loads(self._options.get("fake-hello", "{}"))))

    def _beat(self) -> None:
        loops = 0
        while True:
            now = time.monotonic()
            loops += self._hung_since is None
            age = 0.0 if self._hung_since is None else now - self._hung_since
            if not self._silent:
                self._send(messages.Heartbeat(pid=os.getpid(), now=now, loops=loops, loop_age=age))
            if self._load is not None:
                self._send(messages.Load(pid=os.getpid(), now=now, role="prefill", **self._load))
            time.sleep(0.1)

    def _send(self, message: messages.Message) -> None:
        self._link.send(messages.encode(message))


def _options(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith("--"):
            options[word[2:]] = "" if following.startswith("--") else following
    return options


def _child(title: str, body: object) -> None:
    if os.fork() == 0:
        try:
            setproctitle.setproctitle(title)
            body()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(1)


def _sleep_forever() -> None:
    while True:
        time.sleep(3600)


def _serve_http(options: dict[str, str]) -> None:
    mute = Path(f"{os.environ[messages.AGENT_SOCKET_VARIABLE]}.mute")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while mute.exists():
                time.sleep(0.1)
            known = self.headers["Authorization"] == f"Bearer {options['api-key']}"
            self.send_response(200 if self.path == "/ready" and known else 401)
            self.end_headers()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            while mute.exists():
                time.sleep(0.1)
            told = json.loads(options.get("fake-switch", '{"success": true}'))
            known = self.headers["Authorization"] == f"Bearer {options['api-key']}"
            if known and self.path == "/pd_role_switch" and told.get("success") and "fake-no-hello" not in options:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as orders:
                    order = {"do": "switch", "role": asked["new_role"]}
                    orders.sendto(json.dumps(order).encode(), control_path(os.environ[messages.AGENT_SOCKET_VARIABLE]))
            body = json.dumps(told).encode()
            self.send_response(200 if told.get("success") else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    ThreadingHTTPServer((options["host"], int(options["port"])), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--model")
    given = parser.parse_args()
    die_with_parent(given.parent_pid)
    raise SystemExit(serve(given.socket, FakeRecipe()))
