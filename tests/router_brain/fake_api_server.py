"""An API server with the pods of one namespace: lists in pages, watches with history, and every way of failing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

NAMESPACE = "models"
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


def pod(name: str, *, role: str = "prefill", service: str = "chat", **status: Any) -> dict[str, Any]:
    """A running engine pod; its address ends with the digits of its name."""
    digits = "".join(filter(str.isdigit, name)) or "0"
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {
                "kllm.io/service": service,
                "app.kubernetes.io/component": "engine",
                **({"kllm.io/role": role} if role else {}),
            },
        },
        "status": {"phase": "Running", "podIP": f"10.0.0.{digits}", **status},
    }


class FakeApiServer:
    """Answers on a free port of 127.0.0.1, without TLS.

    Attributes:
        tokens: that are taken.
        requests: query of each request, in order.
        refusals: (status, headers, body) of the next answers.
        mute: watches send nothing at all.
        watching: open watches.
    """

    def __init__(self) -> None:
        self.tokens = {"token-of-the-test"}
        self.requests: list[dict[str, str]] = []
        self.refusals: list[tuple[int, dict[str, str], bytes]] = []
        self.mute = False
        self.watching = 0
        self._pods: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._oldest = 100
        self._news = asyncio.Condition()
        self._raw: list[bytes] = []
        self._dropped = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lists(self) -> int:
        """How many lists were begun."""
        return sum("watch" not in query and "continue" not in query for query in self.requests)

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Go away; `start` comes back on the same port with the same pods."""
        await self.drop()
        assert self._runner is not None
        await self._runner.cleanup()

    async def put(self, document: dict[str, Any], *, silently: bool = False) -> None:
        """Create or change a pod; silently: no watch can ever tell of it."""
        name = document["metadata"]["name"]
        kind = "MODIFIED" if name in self._pods else "ADDED"
        await self._record(kind, document, silently=silently)

    async def remove(self, name: str, *, silently: bool = False) -> None:
        await self._record("DELETED", self._pods[name], silently=silently)

    def has(self, name: str) -> bool:
        return name in self._pods

    def running(self) -> list[str]:
        """ID and role of each pod that is an instance."""
        return [
            f"{name} {role}"
            for name, document in sorted(self._pods.items())
            if (role := document["metadata"]["labels"]["kllm.io/role"]) != "slot"
            and document["status"]["phase"] == "Running"
        ]

    async def bookmark(self) -> None:
        """Move all watches on, past everything."""
        document = {"kind": "Pod", "metadata": {}}
        await self._record("BOOKMARK", document, silently=False)

    async def say(self, line: bytes) -> None:
        """Send a line of our choice down all watches."""
        async with self._news:
            self._raw.append(line)
            self._news.notify_all()

    async def drop(self) -> None:
        """Cut all watches."""
        async with self._news:
            self._dropped += 1
            self._news.notify_all()

    def compact(self) -> None:
        """Forget what happened: a watch from before is too old."""
        self._oldest = self._version

    async def _record(self, kind: str, document: dict[str, Any], *, silently: bool) -> None:
        async with self._news:
            # A list has always all that its version says.
            self._version += 1
            if kind == "DELETED":
                del self._pods[document["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self._pods[document["metadata"]["name"]] = document
            document["metadata"]["resourceVersion"] = str(self._version)
            if not silently:
                self._log.append((self._version, kind, json.loads(json.dumps(document))))
            self._news.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.tokens:
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if self.refusals:
            status, headers, body = self.refusals.pop(0)
            return web.Response(status=status, headers=headers, body=body)
        if request.query.get("watch") == "1":
            return await self._watch(request)
        return self._page(request)

    def _page(self, request: web.Request) -> web.Response:
        begin, size = int(request.query.get("continue") or 0), int(request.query["limit"])
        chosen = [self._pods[name] for name in sorted(self._pods) if _selected(self._pods[name], request)]
        metadata = {"resourceVersion": str(self._version)}
        if begin + size < len(chosen):
            metadata["continue"] = str(begin + size)
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": chosen[begin : begin + size]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version, raws, drops = int(request.query["resourceVersion"]), len(self._raw), self._dropped
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if version < self._oldest:
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {version}"}
            await response.write(_line({"type": "ERROR", "object": gone}))
            return response
        deadline = asyncio.get_running_loop().time() + int(request.query["timeoutSeconds"])
        self.watching += 1
        try:
            while self._dropped == drops and asyncio.get_running_loop().time() < deadline:
                news = [entry for entry in self._log if entry[0] > version]
                async with self._news:
                    if self.mute or not (news or len(self._raw) > raws):
                        try:
                            await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
                        except TimeoutError:
                            break
                        continue
                for number, kind, document in news:
                    version = number
                    if kind == "BOOKMARK" or _selected(document, request):
                        await response.write(_line({"type": kind, "object": document}))
                for line in self._raw[raws:]:
                    raws += 1
                    await response.write(line)
        finally:
            self.watching -= 1
        if self._dropped != drops and request.transport is not None:
            request.transport.abort()
        return response


def _selected(document: dict[str, Any], request: web.Request) -> bool:
    wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
    return wanted.items() <= document["metadata"]["labels"].items()


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"
