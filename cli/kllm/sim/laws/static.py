"""Fixed counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kllm.sim.laws.base import Counts, Observation, Pool


class Static:
    """Always the same counts, bounds or no bounds."""

    interval_seconds = 3600.0
    window_seconds = 60.0

    def __init__(self, counts: Mapping[Pool, int]) -> None:
        self._counts = dict(counts)

    def decide(self, observation: Observation) -> Counts:  # noqa: ARG002
        """The fixed counts."""
        return Counts(self._counts, "Static")
