"""A small OpenAI server with scripted delays and failures, run by asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator


class Server:
    """Answers completions and chats.

    Attributes:
        script: what happens to the n-th stream: `ok`, a status code, `break`, `error`, `hang`, `silent` or `nonsense`;
            the last counts for all that follow.
        gap: seconds before each token.
        bodies: of the streams, as they came.
        hanging: set once an answer hangs.
        answers_probes: whether requests without a stream are answered.
        tells_usage: whether answers hold token counts.
        stages: what it tells of a request's stages, as kLLM's router does, to those that ask for it.
    """

    def __init__(self) -> None:
        self.script: list[str] = ["ok"]
        self.gap = 0.0
        self.bodies: list[dict] = []
        self.authorizations: list[str | None] = []
        self.hanging = asyncio.Event()
        self.answers_probes = True
        self.tells_usage = True
        self.stages: dict[str, float | None] = {}
        self._tells_stages = False
        self.url = ""
        self._tasks: set[asyncio.Task] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Server]:
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while await self._serve_one(reader, writer):
                pass

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.authorizations.append(headers.get("authorization"))
        self._tells_stages = headers.get("x-kllm-timing") == "1"
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split(" ")[1]
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": "first-model"}, {"id": "second-model"}]})
            return True
        body = json.loads(content)
        text = body["prompt"] if path == "/v1/completions" else body["messages"][0]["content"]
        # One token per five characters, and three of a template.
        usage = {"prompt_tokens": 3 + len(text) // 5, "completion_tokens": body["max_tokens"]}
        if not body["stream"] and not self.answers_probes:
            self.hanging.set()
            await reader.read()
            return False
        if not body["stream"]:
            _whole(writer, 200, {"choices": [], **({"usage": usage} if self.tells_usage else {})})
            return True
        act = self.script[min(len(self.bodies), len(self.script) - 1)]
        self.bodies.append(body)
        if act.isdigit():
            _whole(writer, int(act), {"error": {"message": "no room"}})
            return True
        return await self._stream(act, reader, writer, usage=usage, is_chat=path != "/v1/completions")

    async def _stream(
        self, act: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, usage: dict, is_chat: bool
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        if act == "hang":
            self.hanging.set()
            await reader.read()
            return False
        if is_chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(0 if act == "silent" else usage["completion_tokens"]):
            await asyncio.sleep(self.gap)
            _event(writer, {"choices": [{"delta": {"content": "x"}} if is_chat else {"text": "x"}]})
            await writer.drain()
            if act in {"break", "error", "nonsense"} and index == 1:
                break
        if act == "error":
            _event(writer, {"error": {"message": "an engine was lost"}})
        elif act == "nonsense":
            writer.write(b"data: {{{\n\n")
        elif act != "break":
            _event(writer, {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
            if self.tells_usage:
                _event(writer, {"choices": [], "usage": usage})
            if self.stages and self._tells_stages:
                writer.write(b": kllm " + json.dumps(self.stages).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        return False


def _whole(writer: asyncio.StreamWriter, status: int, document: dict) -> None:
    content = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)


def _event(writer: asyncio.StreamWriter, document: dict) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")
