"""The fault matrix: what is done to whom at which stage, and what must come of it. Pure."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from kllm_core.objectives import Role

LIMIT_SECONDS = 5.0
"""From the fault until a request that cannot succeed is told so."""

IDLE_SECONDS = 35.0
"""From the repair until every engine holds nothing. SGLang keeps room that a lost prefill instance might still write to
for 30 s, as it cannot know that nothing will come."""

HANG_SECONDS = 45.0
"""A request without an end after so long counts as hung."""


class Fault(enum.StrEnum):
    """What happens to an instance."""

    KILL = "kill"
    """SIGKILL to every process of the engine."""
    STOP = "stop"
    """SIGSTOP to every process of the engine."""
    RESET = "reset"
    """Every connection between the router and the engine's HTTP port is reset; new ones work."""
    HALF_OPEN = "half_open"
    """Nothing passes between the router and the instance's host, its agent included, and no connection ends."""


class Stage(enum.StrEnum):
    """Where a request is when the fault comes."""

    QUEUE = "queue"
    PREFILL = "prefill"
    PARKED = "parked"
    HANDSHAKE = "handshake"
    TRANSFER = "transfer"
    FIRST_TOKEN = "first_token"
    STREAMING = "streaming"


class Outcome(enum.StrEnum):
    """What the client saw."""

    SUCCESS = "success"
    """The whole answer, equal to that of an undisturbed run."""
    UNAVAILABLE = "unavailable"
    """503 before a byte of the answer."""
    STREAM_ERROR = "stream_error"
    """A well-formed error event in a stream that had begun."""
    WRONG = "wrong"
    """An answer that differs: a token is missing, doubled or another, or the usage is wrong."""
    OTHER = "other"
    """Another status, or a stream that broke without a word."""
    HUNG = "hung"
    """No end in time."""


@dataclass(frozen=True)
class Cell:
    """One place in the matrix.

    Attributes:
        pairs: how many instances of each role there are.
    """

    fault: Fault
    stage: Stage
    role: Role
    pairs: int

    def __str__(self) -> str:
        return f"{self.pairs}P{self.pairs}D-{self.fault}-{self.stage}-{self.role}"

    @property
    def allowed(self) -> frozenset[Outcome]:
        """Outcomes that are right.

        With another instance nothing but success is. Without one the client is told; or it is served, where the
        request no longer needs what was hit, or where the instance lives on.
        """
        if self.pairs > 1:
            return frozenset({Outcome.SUCCESS})
        told = Outcome.STREAM_ERROR if self.stage is Stage.STREAMING else Outcome.UNAVAILABLE
        return frozenset({Outcome.SUCCESS, told})


@dataclass(frozen=True)
class Result:
    """What came of a cell.

    Attributes:
        seconds: from the fault to the end of the answer.
        undisturbed_seconds: a whole undisturbed request.
        message: what the client was told, or what is wrong with the answer.
        idle_seconds: from the repair until all engines were idle; None when they were not in time.
        descriptors: open files of the router afterwards.
    """

    cell: Cell
    outcome: Outcome
    seconds: float
    undisturbed_seconds: float
    message: str = ""
    victim: str = ""
    idle_seconds: float | None = None
    descriptors: int = 0

    @property
    def passed(self) -> bool:
        """Whether it is what must be."""
        told_late = self.outcome is not Outcome.SUCCESS and self.seconds > LIMIT_SECONDS
        return self.outcome in self.cell.allowed and not told_late and self.idle_seconds is not None


def matrix(pairs: int) -> list[Cell]:
    """All cells of one fleet; cheap faults first, so that little is restarted early on."""
    order = (Fault.RESET, Fault.HALF_OPEN, Fault.KILL, Fault.STOP)
    return [Cell(*place, pairs) for place in itertools.product(order, Stage, (Role.PREFILL, Role.DECODE))]
