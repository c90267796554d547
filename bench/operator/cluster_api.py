"""A small client of the API server for whoever plays the cluster: it asks what the operator's own never does."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import aiohttp
from control_plane import BENCH, ControlPlane

MERGE = "application/merge-patch+json"
_AT_ONCE = 24
_SECONDS = 60.0
_LINE_BYTES = 1 << 22
_PAUSE_SECONDS = 0.2
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})


class ClusterApi:
    """Requests as the administrator. An asynchronous context."""

    def __init__(self, plane: ControlPlane) -> None:
        trust = ssl.create_default_context(cafile=str(plane.certificate))
        self._session = aiohttp.ClientSession(
            plane.server,
            headers={"Authorization": f"Bearer {plane.tokens[BENCH]}"},
            connector=aiohttp.TCPConnector(limit=0, ssl=trust),
            read_bufsize=_LINE_BYTES,
        )
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str = "application/json",
        may_be: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """The answer to one request.

        Args:
            method: of HTTP.
            path: with its query.
            body: sent as JSON.
            kind: content type of the body.
            may_be: statuses of errors that are expected; their answer is returned.

        Raises:
            RuntimeError: any other error.
        """
        data = None if body is None else json.dumps(body)
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with (
            self._places,
            self._session.request(method, path, data=data, headers={"Content-Type": kind}, timeout=timeout) as answer,
        ):
            told: dict[str, Any] = await answer.json(content_type=None)
            if answer.status >= 400 and answer.status not in may_be:
                raise RuntimeError(f"{method} {path}: {answer.status} {told.get('message')}")
            return told

    async def watch(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Type and object of each event; what is there comes first, and again when the watch broke."""
        timeout = aiohttp.ClientTimeout(total=None)
        while True:
            async with self._session.get(f"{path}?watch=1&timeoutSeconds=3000", timeout=timeout) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event.get("type") not in _CHANGES:
                        break
                    yield event["type"], event["object"]
            await asyncio.sleep(_PAUSE_SECONDS)
