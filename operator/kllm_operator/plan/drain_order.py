"""Which serving instance leaves first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kllm_operator.plan.members import Member


def drain_order(members: Iterable[Member]) -> list[Member]:
    """Fewest in flight first, then the youngest: it has the least to lose. Unknown counts as most."""
    return sorted(members, key=lambda m: (math.inf if m.in_flight is None else m.in_flight, m.age_seconds, m.id))
