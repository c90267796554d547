"""Keeps a replica that does not lead from writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.exceptions import NotLeadingError
from kllm_operator.kube.resources import Document, Documents, Resource


class FencedApi:
    """The same calls; writes are refused while another replica may lead. Implements `KubeApi`.

    Args:
        api: what carries them out.
        leading: whether this replica leads for certain.
    """

    def __init__(self, api: KubeApi, leading: Callable[[], bool]) -> None:
        self._api = api
        self._leading = leading

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> Document:
        """See `KubeApi.get`."""
        return await self._api.get(resource, namespace=namespace, name=name)

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
        return await self._api.list(
            resource, namespace=namespace, labels=labels, fields=fields, metadata_only=metadata_only
        )

    async def create(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.create`."""
        self._check()
        return await self._api.create(document)

    async def apply(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.apply`."""
        self._check()
        return await self._api.apply(document)

    async def apply_status(self, document: Mapping[str, Any]) -> Document:
        """See `KubeApi.apply_status`."""
        self._check()
        return await self._api.apply_status(document)

    async def patch(
        self, resource: Resource, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Document:
        """See `KubeApi.patch`."""
        self._check()
        return await self._api.patch(resource, namespace=namespace, name=name, body=body, subresource=subresource)

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """See `KubeApi.delete`."""
        self._check()
        await self._api.delete(resource, namespace=namespace, name=name, uid=uid, grace_seconds=grace_seconds)

    def _check(self) -> None:
        if not self._leading():
            raise NotLeadingError("this replica of the operator does not lead, so that it writes nothing")
