"""Whose an object is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def controller_of(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference that controls an object; None when nothing does."""
    references = document["metadata"].get("ownerReferences") or ()
    return next((each for each in references if each.get("controller")), None)


def is_controlled_by(document: Mapping[str, Any], uid: str) -> bool:
    """Whether an object is controlled by exactly the object of this uid."""
    controller = controller_of(document)
    return controller is not None and controller.get("uid") == uid


def is_ending(document: Mapping[str, Any]) -> bool:
    """Whether an object is being deleted."""
    return bool(document["metadata"].get("deletionTimestamp"))
