"""A model hub with one repository, as huggingface_hub asks it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What it has, and what was asked of it.

    Attributes:
        files: of the repository org/model, by name.
        error: (status, X-Error-Code) that everything is answered with.
        fetched: names of files that were sent.
    """

    files: dict[str, bytes]
    error: tuple[int, str] | None = None
    fetched: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub._answer(self)

            def do_GET(self):
                hub._answer(self)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()

    def _answer(self, call: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(call.path).path)
        self.tokens.add(call.headers.get("authorization", ""))
        if self.error is not None:
            _send(call, self.error[0], b"{}", {"X-Error-Code": self.error[1]})
        elif path.startswith("/api/models/org/model/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            document = {"id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False}
            _send(call, 200, json.dumps(document).encode())
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            _send(call, 200, json.dumps(tree).encode())
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._send_file(call, path.removeprefix(f"/org/model/resolve/{COMMIT}/"))
        else:
            _send(call, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, call: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        if call.command == "GET":
            self.fetched.append(name)
        tag = hashlib.sha256(data).hexdigest()
        _send(call, 200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})


def _send(call: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    call.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        call.send_header(name, value)
    call.end_headers()
    if call.command == "GET":
        call.wfile.write(body)
