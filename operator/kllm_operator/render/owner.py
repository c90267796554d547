"""The object that another one belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Owner:
    """An object as others name it."""

    api_version: str
    kind: str
    name: str
    uid: str

    def reference(self) -> dict[str, Any]:
        """As owner reference: it controls what has it, which goes with it."""
        return {
            "apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid,
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
