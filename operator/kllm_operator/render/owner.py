"""The object that another one belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Owner:
    """An object as others name it.

    Attributes:
        waits: when it is deleted in the foreground it stays until what has it as owner has gone. Some clusters let only
            those say so who may update its finalizers.
    """

    api_version: str
    kind: str
    name: str
    uid: str
    waits: bool = True

    def reference(self) -> dict[str, Any]:
        """As owner reference: it controls what has it, which goes with it."""
        return self.share() | {"controller": True} | ({"blockOwnerDeletion": True} if self.waits else {})

    def share(self) -> dict[str, Any]:
        """As one of several owners, none of which controls what has them: it goes when the last of them has gone."""
        return {"apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid}
