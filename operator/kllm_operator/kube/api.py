"""What of the API server the operator uses: seven calls, of which tests have their own implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kllm_operator.kube.resources import Document, Documents, Resource


class KubeApi(Protocol):
    """Calls to an API server; all raise `KubeError`, end in bounded time, and repeat what is safe to repeat."""

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> Document:
        """One object; of kinds that are in no namespace that is None.

        Raises:
            NotFoundError: there is none.
        """

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> Documents:
        """All objects of a namespace, or of all namespaces.

        Args:
            resource: their kind.
            namespace: None is all.
            labels: a label selector.
            fields: a field selector.
            metadata_only: leave out everything but names, labels, annotations and owners.
        """

    async def create(self, document: Mapping[str, Any]) -> Document:
        """Make an object. Not repeated when it is unknown whether it was made.

        Raises:
            AlreadyExistsError: one of that name is there.
        """

    async def apply(self, document: Mapping[str, Any]) -> Document:
        """Make an object be as the document says, or make it (server-side apply); other fields stay.

        uid and resourceVersion in the metadata are preconditions on an object that is there: with a version that none
        has, an object is made or left alone.

        Raises:
            ConflictError: the object of that name has another uid or version.
        """

    async def apply_status(self, document: Mapping[str, Any]) -> Document:
        """The same for the status of an object that is there.

        Raises:
            KubeError: it is not; which one depends on its kind.
        """

    async def patch(
        self, resource: Resource, *, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Document:
        """Change fields of an object (JSON merge patch). uid and resourceVersion in the metadata are preconditions.

        Raises:
            ConflictError: a precondition does not hold.
            NotFoundError: there is no such object.
        """

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """Have exactly this object deleted. Nothing is done when it is gone, even if another has its name.

        Args:
            resource: its kind.
            namespace: where it is.
            name: its name.
            uid: of the object that is meant.
            grace_seconds: that a pod has for its end; None leaves what the pod says.
        """
