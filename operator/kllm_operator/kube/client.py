"""Calls to a real API server, over the official client's connection and login."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import orjson
import stamina
from kubernetes.aio.client.rest import RESTClientObject
from yarl import URL

from kllm_core.labels import MANAGER
from kllm_operator.kube.exceptions import (
    ConflictError,
    GoneError,
    KubeError,
    NotFoundError,
    NotLeadingError,
    TooManyError,
    UnreachableError,
    error_of,
)
from kllm_operator.kube.login import Login, LoginError
from kllm_operator.kube.resources import Document, Documents, Resource, resource_of

_REQUEST_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_ATTEMPTS = 5
_RETRY_SECONDS = 45.0
"""After which a call is not repeated any more; whoever asked tries again later, with newer knowledge."""
_LONGEST_PAUSE_SECONDS = 30.0
_PAGE = 500
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_READS = frozenset({"get", "list"})
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class CallObserver(Protocol):
    """Hears of each request."""

    def __call__(self, *, verb: str, resource: str, code: str, seconds: float) -> None:
        """One request has ended; code is that of HTTP, or the name of what happened instead."""


def _ignore(*, verb: str, resource: str, code: str, seconds: float) -> None:
    del verb, resource, code, seconds


def _always() -> bool:
    return True


class ApiServer:
    """An API server. Implements `kllm_operator.kube.api.KubeApi`; an asynchronous context.

    Args:
        login: the way there, loaded.
        observe: hears of each request.
        leading: whether this process may write. It is asked before each request that writes, so that neither a call
            nor one of its later attempts writes when another replica may lead already.
    """

    def __init__(self, login: Login, *, observe: CallObserver = _ignore, leading: Callable[[], bool] = _always) -> None:
        self._login = login
        self._observe = observe
        self._leading = leading
        self._rest = RESTClientObject(login.configuration)

    async def __aenter__(self) -> Self:
        """Nothing is sent yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close its connections."""
        await self._rest.close()

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> Document:
        """See `KubeApi.get`."""
        return await self._repeat("get", resource, resource.path(namespace=namespace, name=name))

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> Documents:
        """See `KubeApi.list`."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {"limit": str(_PAGE), **{name: text for name, text in selectors.items() if text}}
        try:
            return await self._pages(resource, namespace, query, metadata_only=metadata_only)
        except GoneError:
            # The list grew too old between two of its pages; in one piece it cannot.
            query.pop("limit")
            return await self._pages(resource, namespace, query, metadata_only=metadata_only)

    async def create(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.create`."""
        resource, namespace, _ = _address(document)
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        path = resource.path(namespace=namespace)
        return await self._repeat("create", resource, path, query, body=document, repeatable=False)

    async def apply(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.apply`."""
        return await self._apply(document, subresource="")

    async def apply_status(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.apply_status`."""
        return await self._apply(document, subresource="status")

    async def patch(
        self, resource: Resource, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Document:
        """See `KubeApi.patch`."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return await self._repeat("patch", resource, path, query, body=body, content_type=_MERGE_PATCH)

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """See `KubeApi.delete`."""
        body: Document = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        path = resource.path(namespace=namespace, name=name)
        try:
            await self._repeat("delete", resource, path, body=body)
        except NotFoundError:
            return
        except ConflictError:
            # Either another object has this name, or this one changes at the moment and the call is to be repeated.
            if await self._is_there(resource, namespace, name, uid):
                raise

    async def _is_there(self, resource: Resource, namespace: str, name: str, uid: str) -> bool:
        try:
            found = await self.get(resource, namespace=namespace, name=name)
        except NotFoundError:
            return False
        return bool(found["metadata"]["uid"] == uid)

    async def _apply(self, document: Mapping[str, Any], *, subresource: str) -> Document:
        resource, namespace, name = _address(document)
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self._repeat("apply", resource, path, query, body=document, content_type=_APPLY_PATCH)

    async def _pages(
        self, resource: Resource, namespace: str | None, query: Mapping[str, str], *, metadata_only: bool
    ) -> Documents:
        path = resource.path(namespace=namespace)
        items: Documents = []
        following = ""
        while True:
            page = {**query, **({"continue": following} if following else {})}
            told = await self._repeat("list", resource, path, page, accept=_METADATA_LIST if metadata_only else None)
            # Items of a list do not tell their kind.
            named = {"apiVersion": resource.api_version, "kind": resource.kind}
            items += [{**item, **named} for item in told.get("items") or ()]
            following = (told.get("metadata") or {}).get("continue") or ""
            if not following:
                return items

    async def _repeat(
        self,
        verb: str,
        resource: Resource,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str | None = None,
        repeatable: bool = True,
    ) -> Document:
        """Send a request, and again if that may help and cannot hurt."""
        headers = {"Content-Type": content_type, "Accept": accept or "application/json"}
        url = _url(path, query)

        def pause(error: Exception) -> bool | float:
            if isinstance(error, TooManyError):
                # The server did nothing. It knows best when it will be able to.
                return True if error.retry_after is None else min(error.retry_after, _LONGEST_PAUSE_SECONDS)
            return repeatable and isinstance(error, UnreachableError)

        try:
            return await self._logged_in(verb, resource, url, headers, body)
        except KubeError as error:
            # Nearly all calls end above: what it costs to be ready to repeat one is for those that are repeated.
            if pause(error) is False:
                raise
            failed = error
        async for attempt in stamina.retry_context(on=pause, attempts=_ATTEMPTS, timeout=_RETRY_SECONDS):
            with attempt:
                if attempt.num == 1:
                    raise failed
                return await self._logged_in(verb, resource, url, headers, body)
        raise AssertionError("the last attempt returns or raises")

    async def _logged_in(
        self, verb: str, resource: Resource, url: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> Document:
        try:
            return await self._send(verb, resource, url, headers, body)
        except KubeError as error:
            if error.status != 401:
                raise
        # A token that was replaced is in its file already.
        try:
            await self._login.load()
        except LoginError as error:
            raise UnreachableError(str(error)) from error
        return await self._send(verb, resource, url, headers, body)

    async def _send(
        self, verb: str, resource: Resource, url: str, headers: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> Document:
        began = time.monotonic()
        code = "Cancelled"
        try:
            response = await self._request(verb, f"{self._login.configuration.host}{url}", dict(headers), body)
            code = str(response.status)
            data = await response.read()
            if response.status >= 400:
                raise error_of(response.status, data, retry_after=response.getheader("Retry-After"))
            return _document(data)
        except NotLeadingError as error:
            code = error.reason
            raise
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, OSError, LoginError) as error:
            code = type(error).__name__
            raise UnreachableError(f"the API server cannot be reached: {error or code}") from error
        finally:
            self._observe(verb=verb, resource=resource.qualified, code=code, seconds=time.monotonic() - began)

    async def _request(self, verb: str, url: str, headers: dict[str, str], body: Mapping[str, Any] | None) -> Any:
        authorization = await self._login.authorization()
        if authorization is not None:
            headers["Authorization"] = authorization
        if verb not in _READS and not self._leading():
            raise NotLeadingError("this replica of the operator does not lead, so that it writes nothing")
        methods = {"get": "GET", "list": "GET", "create": "POST", "delete": "DELETE"}
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
        async with asyncio.timeout(_REQUEST_SECONDS + 1.0):
            return await self._rest.request(  # type: ignore[no-untyped-call]
                methods.get(verb, "PATCH"), url, headers=headers, body=body, _request_timeout=timeout
            )


def _address(document: Mapping[str, Any]) -> tuple[Resource, str | None, str]:
    metadata = document["metadata"]
    return resource_of(document), metadata.get("namespace"), str(metadata["name"])


def _url(path: str, query: Mapping[str, str] | None) -> str:
    return str(URL(path, encoded=True).with_query(query)) if query else path


def _document(data: bytes) -> Document:
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # What stands in front of the server may answer in its place.
        raise UnreachableError("the answer is not that of an API server") from error
    if not isinstance(told, dict):
        raise UnreachableError("the answer is not that of an API server")
    return told
