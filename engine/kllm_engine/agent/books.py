"""What the agent has written down of one incarnation of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Role
from kllm_engine.agent.cache.book import CacheBook
from kllm_engine.agent.loads import LoadBook
from kllm_engine.agent.requests import RequestBook


@dataclass(frozen=True)
class Books:
    """Load, requests and cache."""

    loads: LoadBook
    requests: RequestBook
    cache: CacheBook

    def clear(self, role: Role) -> None:
        """Begin again with another role: the incarnation has ended."""
        self.loads.clear(role)
        self.requests.clear()
        self.cache.clear()
