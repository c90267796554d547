"""Load of one role and the terms that make it: 1.0 is the boundary of the objective. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kllm_core.objectives import Load, Role

_AT_FLOOR = 1.05
"""Factor over the floor up to which a load counts as lying there."""


class Term(enum.StrEnum):
    """What can make a role's load."""

    QUEUE_AND_PREFILL = "QueueAndPrefill"
    TPOT = "Tpot"
    HANDOVER = "Handover"
    KV = "KvHighWater"


@dataclass(frozen=True)
class TermLoad:
    """One term of a role's load.

    Attributes:
        floor: what is left of it with unlimited instances.
        limit: what it may reach; 1, or more where the floor leaves no other choice.
    """

    term: Term
    load: Load
    floor: float
    limit: float

    @property
    def strain(self) -> float | None:
        """The load over its limit."""
        return None if self.load.value is None else self.load.value / self.limit

    @property
    def strain_of_count(self) -> float | None:
        """The same, but 0 where the load is what any count would leave: that keeps no instance."""
        at_floor = self.load.value is not None and self.load.value <= self.floor * _AT_FLOOR
        return 0.0 if at_floor else self.strain


@dataclass(frozen=True)
class RoleLoad:
    """Load of one role with `count` instances.

    Attributes:
        load: that of the term that decided.
        strain: the highest load over its limit; what the planner compares.
        term: which term that is; None when nothing is known.
        complete: whether nothing that could raise it is silent; only then may it justify fewer instances.
    """

    role: Role
    count: int
    load: Load
    strain: float | None
    term: Term | None
    complete: bool
    terms: tuple[TermLoad, ...] = ()

    @property
    def strain_of_count(self) -> float | None:
        """The highest strain of those terms that another count would change; 0 if there is none, None if unknown."""
        return max((each.strain_of_count for each in self.terms if each.strain_of_count is not None), default=None)

    @property
    def predicted_strain(self) -> float | None:
        """The highest prediction over its limit."""
        strains = [each.load.predicted / each.limit for each in self.terms if each.load.predicted is not None]
        return max(strains, default=None)
