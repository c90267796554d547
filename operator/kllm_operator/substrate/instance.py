"""One instance on this machine, and how long things may take there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.substrate.base import Observed
from kllm_operator.substrate.child import Child


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which waiting ends.

    Attributes:
        model: a download of a large model over a slow line.
        serving: from the start of an agent until its engine serves; covers compilation and loading of large weights.
        router: from its start until it listens.
        stop_one: grace of one instance; it is drained before if that matters.
        stop_all: of the whole run. Short, because people wait for it.
    """

    model: float = 6 * 3600.0
    serving: float = 1800.0
    router: float = 120.0
    stop_one: float = 5.0
    stop_all: float = 2.2


@dataclass
class ProcessInstance:
    """An agent's process and what became of it.

    Attributes:
        began: seconds on the substrate's clock at its start.
        since: the same of its present state.
        draining_to: the role that it shall have once it is drained.
        start: what the agent told when it served.
        settled: set once it serves or has failed.
    """

    id: str
    role: Role
    child: Child
    began: float
    since: float
    state: InstanceState = InstanceState.STARTING
    agent: str | None = None
    message: str = "the agent starts"
    drained: bool = False
    overdue: bool = False
    ending: bool = False
    draining_to: Role | None = None
    start: dict[str, Any] = field(default_factory=dict)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, state: InstanceState, message: str, *, now: float) -> None:
        """Take a state."""
        self.state, self.message, self.since = state, message, now
        if state in {InstanceState.SERVING, InstanceState.FAILED}:
            self.settled.set()

    def observed(self, *, now: float, ready_seconds: float) -> Observed:
        """As others see it; one that does not get ready in time has failed."""
        if self.state is InstanceState.STARTING and now - self.since > ready_seconds and not self.ending:
            self.move(InstanceState.FAILED, f"is not ready after {ready_seconds:.0f} s", now=now)
        return Observed(
            id=self.id,
            role=self.role,
            state=self.state,
            agent=self.agent,
            message=self.message,
            age_seconds=now - self.began,
            drained=self.drained,
            overdue=self.overdue,
            ending=self.ending,
            draining_to=self.draining_to if self.state is InstanceState.DRAINING else None,
        )
