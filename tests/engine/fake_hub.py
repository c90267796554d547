"""A model hub that speaks as much of Hugging Face's HTTP API as a download needs, on a port of its own.

Repositories whose name says so fail: `team/gated`, `team/absent`, `team/forbidden`, `team/busy`, `team/private`
(which wants a token), `team/broken` (whose files end too early).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_for_tests_only"
_REFUSALS = {
    "gated": (403, "GatedRepo"),
    "absent": (401, "RepoNotFound"),
    "forbidden": (403, ""),
    "busy": (503, ""),
}


class FakeHub:
    """Serves the files of one folder as every repository.

    Attributes:
        endpoint: for HF_ENDPOINT.
        downloads: names of files that were sent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint = ""
        self.downloads: list[str] = []

    def application(self) -> web.Application:
        """Its routes."""
        application = web.Application()
        application.router.add_get("/api/models/{team}/{name}/revision/{revision}", self._revision)
        application.router.add_get("/api/models/{team}/{name}/tree/{revision}", self._tree)
        application.router.add_get("/{team}/{name}/resolve/{revision}/{file}", self._file)
        return application

    async def _revision(self, request: web.Request) -> web.Response:
        refusal = _refused(request)
        if refusal is not None:
            return refusal
        if request.match_info["revision"] not in {"main", COMMIT}:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        files = [{"rfilename": path.name} for path in self._folder.iterdir()]
        name = f"{request.match_info['team']}/{request.match_info['name']}"
        return web.json_response({"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []})

    async def _tree(self, request: web.Request) -> web.Response:
        return _refused(request) or web.json_response(
            [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)}
                for path in sorted(self._folder.iterdir())
            ]
        )

    async def _file(self, request: web.Request) -> web.StreamResponse:
        refusal = _refused(request)
        if refusal is not None:
            return refusal
        path = self._folder / request.match_info["file"]
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT}
        body = path.read_bytes()
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(body))})
        self.downloads.append(path.name)
        if request.match_info["name"] != "broken":
            return web.Response(headers=headers, body=body)
        response = web.StreamResponse(headers=headers | {"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.close()
        return response


@asynccontextmanager
async def fake_hub(folder: Path) -> AsyncIterator[FakeHub]:
    """Serve a folder's files until the block ends."""
    hub = FakeHub(folder)
    runner = web.AppRunner(hub.application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        hub.endpoint = f"http://{host}:{port}"
        yield hub
    finally:
        await runner.cleanup()


def _refused(request: web.Request) -> web.Response | None:
    name = request.match_info["name"]
    if name == "private" and request.headers.get("Authorization") != f"Bearer {TOKEN}":
        name = "absent"
    if name not in _REFUSALS:
        return None
    status, code = _REFUSALS[name]
    return web.Response(status=status, headers={"X-Error-Code": code} if code else {})


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
