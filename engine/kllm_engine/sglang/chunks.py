"""Body messages of one streamed response, sent as units: the token ids first, then all events that they made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]

_COMMENT = b": kllm-ids %b\n\n"


class ChunkStream:
    """Stands between a response and the client.

    Attributes:
        holding: events wait until their token ids are known; those after the last ids leave with the response's end.
        muted: events are dropped, because the client has them already.
    """

    def __init__(self) -> None:
        self.holding = False
        self.muted = False
        self._send: Send | None = None
        self._held: list[bytes] = []
        self._ids: list[int] = []

    def begin(self, send: Send) -> Send:
        """Take the way to the client; gives the one for the response."""
        self._send = send
        return self._take

    async def release(self, ids: Sequence[int]) -> None:
        """All events that these ids made have come: send them as one chunk.

        Ids that made no event are told with the next ones.
        """
        self._ids += ids
        if not self._held or self._send is None:
            return
        body = _COMMENT % ",".join(map(str, self._ids)).encode() + b"".join(self._held)
        self._held.clear()
        self._ids.clear()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _take(self, message: dict[str, Any]) -> None:
        if self._send is None:
            raise RuntimeError("a response was sent before the stream had begun")
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        more = message.get("more_body", False)
        if self.muted and more:
            return
        if not self.holding:
            await self._send(message)
            return
        self._held.append(message.get("body", b""))
        if not more:
            body = b"".join(self._held)
            self._held.clear()
            await self._send({**message, "body": body})
