"""An engine that speaks just enough HTTP to be asked by a router, and does exactly what a test tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

from kllm_core.objectives import Role
from kllm_router.interfaces import Endpoint


@dataclass
class Call:
    """One request that the engine got; `closed` once it is answered or its connection is gone."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Reply:
    """Writes the answer to one call."""

    writable: asyncio.Event

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def begin(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    def end(self) -> None:
        self.transport.write(b"0\r\n\r\n")

    def raw(self, data: bytes) -> None:
        self.transport.write(data)

    def cut(self) -> None:
        self.transport.abort()


Script = Callable[[Call, Reply], Awaitable[None]]


def delta(text: str, *, rid: str = "x") -> dict[str, Any]:
    """A chat chunk as SGLang writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "matched_stop": None}
    return {
        "id": rid,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": None,
    }


def usage_chunk(*, prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The final chunk as SGLang writes it."""
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        "reasoning_tokens": 0,
    }
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}


async def hang(call: Call, reply: Reply) -> None:
    """Never answer."""
    await call.closed.wait()


def answer(status: int, value: Any) -> Script:
    """Answer with JSON."""

    async def script(call: Call, reply: Reply) -> None:
        reply.json(status, value)

    return script


def stream(*texts: str, completion: int | None = None) -> Script:
    """Stream some chunks, the usage chunk and the end."""

    async def script(call: Call, reply: Reply) -> None:
        reply.begin()
        for text in texts:
            reply.event(delta(text))
        reply.event(usage_chunk(prompt=3, completion=len(texts) if completion is None else completion))
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    return script


class FakeEngine:
    """Listens on a free port; `script` answers every call but aborts, which are only noted."""

    def __init__(self, instance_id: str, role: Role) -> None:
        self.instance_id = instance_id
        self.role = role
        self.script: Script = hang
        self.calls: list[Call] = []
        self.aborts: list[str] = []
        self.abort_status = 200
        self.connections = 0
        self.open_connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Die: every connection is reset, nothing listens."""
        if self._server is not None:
            self._server.close()
        tasks = [connection.task for connection in self.open_connections if connection.task is not None]
        for connection in list(self.open_connections):
            connection.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drop_connections(self) -> None:
        """Close every connection, as an engine does with idle ones."""
        for connection in list(self.open_connections):
            connection.transport.close()

    @property
    def endpoint(self) -> Endpoint:
        prefill = self.role is Role.PREFILL
        return Endpoint(
            instance_id=self.instance_id,
            role=self.role,
            http_host="127.0.0.1",
            http_port=self._port,
            bootstrap_host="127.0.0.1" if prefill else "",
            bootstrap_port=8998 if prefill else 0,
            incarnation=1,
        )


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.task: asyncio.Task[None] | None = None
        self.call: Call | None = None
        self.data = b""
        self.number = 0
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.engine.connections += 1
        self.number = self.engine.connections
        self.engine.open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.open_connections.discard(self)
        if self.call is not None:
            self.call.closed.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, separator, rest = self.data.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers["content-length"])
        if len(rest) < length:
            return
        self.data = rest[length:]
        self.serve(Call(lines[0].split(" ")[1], headers, json.loads(rest[:length]), self.number))

    def serve(self, call: Call) -> None:
        reply = Reply(self.transport)
        reply.writable = self.writable
        if call.path == "/abort_request":
            self.engine.aborts.append(call.body["rid"])
            reply.json(self.engine.abort_status, None)
            return
        assert self.task is None, "the router sent a request while another was being answered"
        self.engine.calls.append(call)
        self.call = call
        self.task = asyncio.get_running_loop().create_task(self.run(call, reply))

    async def run(self, call: Call, reply: Reply) -> None:
        await self.engine.script(call, reply)
        call.closed.set()
        self.task = self.call = None
