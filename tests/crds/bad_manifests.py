"""Manifests that cannot be served, and who says so: the API server at once, or the operator in a condition.

Each file of `bad/` has `manifest`; `change`, if that is what is refused, applied after the manifest; and either
`refused`, a part of the API server's message, or `condition`, with a part of its message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "bad"


@dataclass(frozen=True)
class ExpectedCondition:
    """What the operator says within ten seconds; `message` is a part of it."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class BadManifest:
    """One case; exactly one of `refused` and `condition` is set."""

    name: str
    manifest: dict[str, Any]
    change: dict[str, Any] | None = None
    refused: str | None = None
    condition: ExpectedCondition | None = None


def bad_manifests() -> list[BadManifest]:
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def _read(path: Path) -> BadManifest:
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    condition = told.pop("condition", None)
    return BadManifest(path.stem, **told, condition=ExpectedCondition(**condition) if condition else None)
