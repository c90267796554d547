"""Stands for kllm-engine and kllm-router: the same arguments, events and ends, and nothing behind them.

FAKE_FAIL=NAME makes the program of that subcommand (or instance id) fail; FAKE_STUBBORN=1 makes all of them ignore
SIGTERM; FAKE_STRAY=1 makes agents leave processes in sessions of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kllm_core.lifetime import die_with_parent

ANSWER = ("Paris", " is", " the", " capital", ".")


def say(**event: object) -> None:
    """Print one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def options(arguments: list[str]) -> dict[str, str]:
    """All options of the form --name value."""
    pairs = itertools.pairwise(arguments)
    return {name.removeprefix("--"): value for name, value in pairs if name.startswith("--")}


def wait_for_end() -> None:
    """Serve until SIGTERM."""
    ended = threading.Event()
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.wait(0.05):
        pass


def fail_if_asked(*names: str) -> None:
    """Fail in the way that FAKE_FAIL asks for."""
    if os.environ.get("FAKE_FAIL") in names:
        sys.stderr.write("first line of the log\nthe reason is in the last line\n")
        sys.stderr.flush()
        say(event="failed", message="out of luck")
        raise SystemExit(1)


def model(uri: str, given: dict[str, str]) -> None:
    """Make a model folder."""
    fail_if_asked("model")
    folder = Path(given["cache"]) / "models" / uri.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    say(event="progress", message="unpacking", fraction=0.5)
    say(event="model", path=str(folder))


def zygote(given: dict[str, str]) -> None:
    """Listen on the socket."""
    fail_if_asked("zygote")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(given["socket"])
        server.listen()
        say(event="ready", seconds=0.1)
        wait_for_end()


def agent(given: dict[str, str]) -> None:
    """Say listening, then serving; with STUB_FOLDER, be an agent that can be called."""
    if os.environ.get("STUB_FOLDER"):
        import asyncio

        from substrate.stub_agent import serve

        asyncio.run(serve(given))
        return
    if os.environ.get("FAKE_STRAY"):
        code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    say(event="listening", agent="127.0.0.1:1")
    fail_if_asked("agent", given["instance-id"])
    say(event="serving", seconds=0.1, phases=[])
    wait_for_end()


class Handler(BaseHTTPRequestHandler):
    """A router that knows one answer."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Stay silent."""

    def do_GET(self) -> None:
        """Status and models."""
        instance = {
            "id": "chat-prefill-0", "role": "prefill", "state": "Serving",
            "load": {"running_requests": 1, "queued_requests": 2, "parked_requests": 3,
                     "kv_used_tokens": 25, "kv_total_tokens": 100},
        }  # fmt: skip
        models = {"object": "list", "data": [{"id": "smollm2", "object": "model", "created": 0, "owned_by": "kllm"}]}
        self.answer(models if self.path == "/v1/models" else {"instances": [instance]})

    def do_POST(self) -> None:
        """The answer, streamed."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] != "smollm2":
            self.answer(
                {"error": {"message": f"no model {body['model']}", "type": "NotFound", "code": 404}}, status=404
            )
            return
        words = () if os.environ.get("FAKE_SILENT") else ANSWER
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer({"id": "1", "object": "chat.completion", "created": 0, "model": "smollm2", "choices": [choice]})
            return
        self.send_response(200)
        for name, value in (
            ("content-type", "text/event-stream"), ("connection", "close"),
            ("x-kllm-prefill", "chat-prefill-0"), ("x-kllm-decode", "chat-decode-0"), ("x-kllm-binding", "late"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        for word in words:
            delta = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "smollm2", "choices": [delta]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, document: dict[str, object], *, status: int = 200) -> None:
        """Send JSON."""
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def router(given: dict[str, str]) -> None:
    """Serve HTTP."""
    fail_if_asked("router")
    host, _, port = given["listen"].rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    levels = "127.0.0.1:2"
    if os.environ.get("STUB_FOLDER"):
        from substrate.stub_router import serve_levels

        levels = serve_levels()
    say(event="listening", http=f"{host}:{server.server_port}", grpc=levels)
    wait_for_end()
    if levels != "127.0.0.1:2":
        os._exit(0)  # streams to the operator would keep the process


def main() -> None:
    """Take the program's part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    program, rest = parser.parse_known_args()
    given = options(rest)
    if "parent-pid" in given:
        die_with_parent(int(given["parent-pid"]))
    if program.program.endswith("kllm_router.main"):
        router(given)
        return
    match rest[0]:
        case "model":
            model(rest[1], given)
        case "zygote":
            zygote(given)
        case "agent":
            agent(given)
        case other:
            raise SystemExit(f"no subcommand {other}")


if __name__ == "__main__":
    main()
