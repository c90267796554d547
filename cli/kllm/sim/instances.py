"""One simulated instance: an engine with a state, and what the router has seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kllm.sim.laws.base import Pool
from kllm_core.engine_model.engine import Engine
from kllm_core.fleet import EngineLoad, InstanceState
from kllm_core.fleet import Instance as Seen
from kllm_core.objectives import Role

if TYPE_CHECKING:
    from kllm.sim.agenda import Entry
    from kllm.sim.flights import Flight

REPORT_SECONDS = 0.1
"""Between two reports of an engine to a router, as agents send them. Here one is made when the router looks and the
last one is older, so that a router that looks rarely sees younger numbers than a real one."""


class Instance:
    """One instance, or one slot.

    Attributes:
        begun_at: when the step began that made it what it is.
        engine: None until it serves.
        flights: requests that it has, or that were sent to it.
        pending: what will change its state.
        timer: when its engine changes by itself.
        is_drained: it was asked to drain, and is empty.
        is_overdue: it did not get empty in time.
        becomes: the role that it shall have once it is drained; None: it leaves.
        is_ending: it is being ended.
    """

    def __init__(self, name: str, pool: Pool, *, now: float, is_slot: bool) -> None:
        self.id, self.pool, self.is_slot = name, pool, is_slot
        self.state = InstanceState.STARTING
        self.begun_at = self.made_at = now
        self.incarnation = 1
        self.engine: Engine | None = None
        self.flights: dict[Flight, None] = {}
        self.pending: Entry | None = None
        self.timer: Entry | None = None
        self.is_drained = self.is_overdue = self.is_ending = False
        self.becomes: Role | None = None
        self.message = "starts"
        self._load: EngineLoad | None = None
        self._seen: Seen | None = None
        self._taken_at = 0.0
        self._unreported_requests = self._unreported_tokens = 0

    @property
    def role(self) -> Role:
        """Its role; the planner counts engines for whole requests as decode."""
        return Role.PREFILL if self.pool is Pool.PREFILL else Role.DECODE

    @property
    def serves(self) -> bool:
        """Whether it takes new requests."""
        return self.state is InstanceState.SERVING

    @property
    def working(self) -> Engine:
        """The engine of one that serves or drains."""
        if self.engine is None:
            raise RuntimeError(f"{self.id} is {self.state} and has no engine")
        return self.engine

    def load(self, now: float) -> EngineLoad | None:
        """What its engine says at this moment."""
        return None if self.engine is None else self.engine.load(now)

    # --- as the router sees it

    def look(self, now: float) -> tuple[Seen, float]:
        """It with its last report, and the age of that."""
        age = now - self._taken_at
        if self._seen is None or self._seen.state is not self.state or age >= REPORT_SECONDS:
            self._load, self._taken_at, age = self.load(now), now, 0.0
            self._seen = Seen(
                self.id, self.role, self.state, self.incarnation, self._load,
                page_size=1 if self.engine is None else self.engine.spec.block_tokens,
            )  # fmt: skip
            self._unreported_requests = self._unreported_tokens = 0
        return self._seen, age

    @property
    def unreported(self) -> tuple[int, int]:
        """Requests that its last report cannot contain yet, and their tokens."""
        return self._unreported_requests, self._unreported_tokens

    def send(self, flight: Flight, tokens: int) -> None:
        """A request goes there; so many tokens of it are work."""
        self.flights[flight] = None
        self._unreported_requests += 1
        self._unreported_tokens += tokens

    def leave(self, flight: Flight) -> None:
        """A request has left."""
        self.flights.pop(flight, None)
