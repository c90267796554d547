"""Requests to a prefill and a decode engine without a router, with the response's HTTP chunks as they were sent."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kllm_core.contracts.engine.v1 import engine_pb2

_NUMBERS = random.Random(20_011)
_MARK = b": kllm-ids "


@dataclass(frozen=True)
class Unit:
    """One HTTP chunk: the ids that it tells (None if it tells none), and its events."""

    ids: list[int] | None
    events: list[dict[str, Any] | str]


@dataclass
class Told:
    """A whole stream."""

    status: int
    units: list[Unit] = field(default_factory=list)
    body: bytes = b""

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events but the closing one."""
        return [event for unit in self.units for event in unit.events if isinstance(event, dict)]

    def ids(self, units: int | None = None) -> list[int]:
        """Ids that the first units told."""
        return [token for unit in self.units[:units] for token in unit.ids or ()]


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine."""

    prefill: engine_pb2.Instance
    decode: engine_pb2.Instance
    token: str

    async def stream(self, path: str, body: dict[str, Any], **wish: Any) -> Told:
        """A streamed request, posted to both at once."""
        bound = self._bound(body)
        resume = {name: value for name, value in wish.items() if name == "kllm_resume_output_ids"}
        prefilling = asyncio.ensure_future(self.post(self.prefill, path, bound | resume))
        told = await self._stream(path, bound | wish)
        answer = await prefilling
        assert answer.status_code == told.status, (answer.text, told.body)
        return told

    async def stream_alone(self, path: str, body: dict[str, Any], **wish: Any) -> Told:
        """A streamed request that only the decode engine gets."""
        return await self._stream(path, self._bound(body) | wish)

    def _bound(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | {
            "rid": f"{_NUMBERS.getrandbits(128):032x}", "bootstrap_room": _NUMBERS.getrandbits(62),
            "bootstrap_host": self.prefill.bootstrap_host, "bootstrap_port": self.prefill.bootstrap_port,
        }  # fmt: skip

    async def post(self, engine: engine_pb2.Instance, path: str, body: dict[str, Any]) -> httpx2.Response:
        """A request to one of them."""
        async with httpx2.AsyncClient(timeout=60) as client:
            headers = {"authorization": f"Bearer {self.token}"}
            return await client.post(f"http://{engine.http_address}{path}", json=body, headers=headers)

    async def _stream(self, path: str, body: dict[str, Any]) -> Told:
        host, _, port = self.decode.http_address.partition(":")
        options = {} if path == "/generate" else {"stream_options": {"include_usage": True}}
        content = json.dumps({**body, **options, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {self.token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
            try:
                writer.write(head.encode() + content)
                return await _read(reader)
            finally:
                writer.close()


async def _read(reader: asyncio.StreamReader) -> Told:
    header = (await reader.readuntil(b"\r\n\r\n")).lower()
    told = Told(int(header.split(b" ", 2)[1]))
    if b"chunked" not in header:
        told.body = await reader.read()
        return told
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        told.body += chunk
        told.units.append(_unit(chunk))
    return told


def _unit(chunk: bytes) -> Unit:
    *events, rest = chunk.split(b"\n\n")
    assert rest == b"", f"a chunk ends within an event: {chunk!r}"
    ids = None
    if events and events[0].startswith(_MARK):
        ids = [int(token) for token in events.pop(0).removeprefix(_MARK).split(b",")]
    assert all(event.startswith(b"data: ") for event in events), chunk
    texts = [event.removeprefix(b"data: ") for event in events]
    return Unit(ids, [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts])
