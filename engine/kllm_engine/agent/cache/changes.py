"""Changes of the cache, in the fleet's block hashes. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.Enum):
    """Where a block lies. Values are SGLang's names of the medium."""

    DEVICE = "GPU"
    HOST = "CPU_PINNED"
    DISK = "DISK"
    SHARED = "EXTERNAL"


@dataclass(frozen=True)
class Stored:
    """Blocks that entered a tier."""

    tier: Tier
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Removed:
    """Blocks that left a tier."""

    tier: Tier
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Cleared:
    """All tiers became empty."""


Change = Stored | Removed | Cleared


def weight(change: Change) -> int:
    """What a change costs to keep, in blocks."""
    return 1 if isinstance(change, Cleared) else 1 + len(change.blocks)
