"""Where the desired counts of both pools are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts


class CountsError(Exception):
    """The counts could not be written; the text says why, for people."""


class Counts(Protocol):
    """The desired counts of both pools, as anyone may see them."""

    def read(self) -> Mapping[Role, int] | None:
        """What the pools ask for now; None, or without a role: nobody has decided it yet."""

    async def write(self, desired: DesiredCounts) -> None:
        """Let both pools ask for what the planner decided.

        Raises:
            CountsError: they do not, or not both; what `read` tells stands.
        """


class MemoryCounts:
    """Counts that live as long as the process. Implements `Counts`.

    Args:
        counts: what is asked for before anybody has decided it.
    """

    def __init__(self, counts: Mapping[Role, int] | None = None) -> None:
        self._counts = counts

    def read(self) -> Mapping[Role, int] | None:
        """What was written last."""
        return self._counts

    async def write(self, desired: DesiredCounts) -> None:
        """Remember the counts."""
        self._counts = {role: desired.of(role) for role in Role}
