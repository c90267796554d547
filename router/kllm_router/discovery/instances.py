"""What discovery tells of an instance; everything else comes from its agent."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Role


@dataclass(frozen=True)
class DiscoveredInstance:
    """One instance of the service.

    Attributes:
        role: as it was started; its agent's word goes before it.
        agent: host:port of its agent.
    """

    id: str
    role: Role
    agent: str
