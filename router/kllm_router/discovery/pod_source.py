"""Pods of one namespace by label, listed and watched at the API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx2
import orjson

from kllm_router.discovery.access import Access
from kllm_router.discovery.exceptions import ApiServerError, ExpiredError

Pod = dict[str, Any]

_REASONS = {401: "unauthorized", 403: "forbidden", 429: "too_many_requests"}
_MAX_REASON_BYTES = 16 * 1024


@dataclass(frozen=True)
class PodSourceSettings:
    """Bounds of each call."""

    connect_seconds: float = 5.0
    """Connection and TLS handshake."""
    list_seconds: float = 30.0
    """One page of a list."""
    page: int = 500
    """Pods per page of a list."""
    watch_seconds: float = 290.0
    """After that the API server ends a watch and the next one goes on; below the 300 s of many load balancers."""
    stall_seconds: float = 80.0
    """A watch that says nothing for so long is given up. The API server sends a bookmark every minute."""
    page_bytes: int = 64 * 1024 * 1024
    """A larger page of a list is refused."""
    event_bytes: int = 4 * 1024 * 1024
    """A larger event is refused. An object has at most 1.5 MiB at the API server."""


@dataclass(frozen=True)
class PodEvent:
    """One line of a watch.

    Attributes:
        kind: ADDED, MODIFIED, DELETED or BOOKMARK.
        version: the resource version that a watch goes on from.
    """

    kind: str
    version: str
    pod: Pod


class PodSource:
    """One connection to the API server. An asynchronous context.

    Args:
        selector: of labels, as `kubectl -l` takes it.

    Raises:
        AccessError: a certificate or the token cannot be read; any call raises it.
    """

    def __init__(self, access: Access, *, namespace: str, selector: str, settings: PodSourceSettings) -> None:
        self._access = access
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = selector
        self._settings = settings
        timeout = httpx2.Timeout(settings.list_seconds, connect=settings.connect_seconds, read=settings.stall_seconds)
        # No proxy and no .netrc of the environment: the address is the API server's own.
        self._client = httpx2.AsyncClient(
            base_url=access.server, verify=access.tls(), timeout=timeout, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> Self:
        """Connect at the first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def list(self) -> tuple[list[Pod], str]:
        """All pods, as of now, and the resource version that a watch goes on from.

        Raises:
            ExpiredError: the list took longer than its snapshot was kept.
            ApiServerError: it could not be had.
        """
        pods: list[Pod] = []
        parameters = {"labelSelector": self._selector, "limit": str(self._settings.page)}
        while True:
            try:
                async with asyncio.timeout(self._settings.list_seconds):
                    page = _document(await self._get(parameters))
            except TimeoutError:
                raise ApiServerError(
                    f"no complete list within {self._settings.list_seconds:g} s", reason="timeout"
                ) from None
            metadata, items = page.get("metadata"), page.get("items")
            if not isinstance(metadata, dict) or not isinstance(items, list):
                raise ApiServerError("the answer is no list of pods", reason="garbage")
            pods += [item for item in items if isinstance(item, dict)]
            following = metadata.get("continue")
            if not following:
                return pods, _version(metadata)
            parameters["continue"] = str(following)

    async def watch(self, version: str) -> AsyncGenerator[PodEvent, None]:
        """What changed since a resource version, until the API server ends the watch.

        Raises:
            ExpiredError: that version is too old; list again.
            ApiServerError: it cannot go on.
        """
        parameters = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(round(self._settings.watch_seconds)),
        }
        async with contextlib.aclosing(self._lines(parameters)) as lines:
            async for line in lines:
                event = _document(line)
                kind, pod = event.get("type"), event.get("object")
                if not isinstance(kind, str) or not isinstance(pod, dict):
                    raise ApiServerError("the watch sent something that is no event", reason="garbage")
                if kind == "ERROR":
                    raise _failure(_number(pod.get("code")), str(pod.get("message", "")), retry_after=None)
                metadata = pod.get("metadata")
                yield PodEvent(kind, _version(metadata if isinstance(metadata, dict) else {}), pod)

    async def _get(self, parameters: dict[str, str]) -> bytes:
        body = bytearray()
        async with self._answer(parameters) as response:
            async for part in response.aiter_bytes():
                body += part
                if len(body) > self._settings.page_bytes:
                    raise ApiServerError(
                        f"a page of the list has over {self._settings.page_bytes} bytes", reason="garbage"
                    )
        return bytes(body)

    async def _lines(self, parameters: dict[str, str]) -> AsyncGenerator[bytes, None]:
        rest = bytearray()
        async with self._answer(parameters) as response:
            async for part in response.aiter_bytes():
                first, *others = part.split(b"\n")
                rest += first
                for other in others:
                    if line := bytes(rest).strip():
                        yield line
                    rest = bytearray(other)
                if len(rest) > self._settings.event_bytes:
                    raise ApiServerError(f"an event has over {self._settings.event_bytes} bytes", reason="garbage")

    @contextlib.asynccontextmanager
    async def _answer(self, parameters: dict[str, str]) -> AsyncIterator[httpx2.Response]:
        headers = {"accept": "application/json", **self._access.headers()}
        try:
            async with self._client.stream("GET", self._path, params=parameters, headers=headers) as response:
                if response.status_code != 200:
                    raise _failure(
                        response.status_code, await _told(response), retry_after=response.headers.get("retry-after")
                    )
                yield response
        except httpx2.TimeoutException as error:
            said = f"it said nothing for {self._settings.stall_seconds:g} s"
            connecting = isinstance(error, httpx2.ConnectTimeout)
            raise ApiServerError("no connection in time" if connecting else said, reason="timeout") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise ApiServerError(str(error) or type(error).__name__, reason="unreachable") from error


def _document(data: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiServerError(f"the answer is not JSON: {error}", reason="garbage") from error
    if not isinstance(parsed, dict):
        raise ApiServerError("the answer is not a JSON object", reason="garbage")
    return parsed


def _version(metadata: dict[str, Any]) -> str:
    version = metadata.get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise ApiServerError("the answer has no resourceVersion", reason="garbage")
    return version


async def _told(response: httpx2.Response) -> str:
    """Why it refused: the message of its Status object, or how its page begins."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _MAX_REASON_BYTES:
            break
    with contextlib.suppress(ApiServerError):
        return str(_document(bytes(body)).get("message", ""))
    return bytes(body[:200]).decode(errors="replace")


def _failure(code: int, message: str, *, retry_after: str | None) -> ApiServerError:
    if code == 410:
        return ExpiredError(message)
    asked = _number(retry_after)
    return ApiServerError(
        f"it answered {code}: {message}",
        reason=_REASONS.get(code, "server_error" if code >= 500 else "refused"),
        retry_after=float(asked) if asked else None,
    )


def _number(given: object) -> int:
    """A whole number of a few digits, else 0."""
    text = str(given)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
