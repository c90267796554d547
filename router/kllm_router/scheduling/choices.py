"""What a choice is: the instance, why, and what the others would have cost. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kllm_core.fleet import EngineLoad, Instance


class Refused(enum.StrEnum):
    """Why no instance was chosen."""

    NONE_SERVING = "NoneServing"
    OVERLOADED = "Overloaded"
    TOO_LARGE = "RequestTooLarge"


class Standing(enum.IntEnum):
    """How willingly a candidate is taken; a better one always goes before a cheaper one."""

    GOOD = 0
    FULL = 1
    """Prefill: parked KV is at its limit, so that the prompt would wait for a decode instance."""
    UNKNOWN = 2
    """Its load is unknown or stale: kept, not preferred."""
    OVER_HIGH_WATER = 3
    """Decode: it gets nothing new while another one can take it."""


class Cost(NamedTuple):
    """What one candidate was judged by, for logs.

    Attributes:
        seconds: predicted; what it stands for differs between prefill and decode.
        price: seconds that the choice is expected to cost those that come later.
        own_seconds: of `seconds`, what the request's own work takes.
    """

    instance_id: str
    standing: Standing
    seconds: float
    in_flight: int
    price: float = 0.0
    own_seconds: float = 0.0

    @property
    def wait_seconds(self) -> float:
        """Of `seconds`, what passes before the request's own work begins."""
        return self.seconds - self.own_seconds

    @property
    def total(self) -> float:
        """What candidates are compared by."""
        return self.seconds + self.price


@dataclass(frozen=True)
class Choice:
    """The instance that gets the request.

    Attributes:
        reason: CamelCase: OnlyCandidate, LeastCost, FewestInFlight, or the standing of a candidate taken for want of a
            better one.
    """

    instance_id: str
    reason: str
    message: str
    costs: tuple[Cost, ...] = ()

    @property
    def cost(self) -> Cost:
        """That of the chosen instance."""
        return next(cost for cost in self.costs if cost.instance_id == self.instance_id)


@dataclass(frozen=True)
class Refusal:
    """No instance gets the request.

    Attributes:
        retry_after_seconds: when it may be worth another try; None when it is not.
    """

    reason: Refused
    message: str
    retry_after_seconds: float | None = None


def pick(costs: Sequence[Cost], *, tie_seconds: float, rotation: int) -> Choice:
    """The cheapest of the best standing; among equals the one with fewest in flight, then in turn.

    Args:
        costs: at least one.
        tie_seconds: costs this close to the least are equal.
        rotation: a counter of the caller that makes equals take turns.
    """
    best = min(cost.standing for cost in costs)
    willing = [cost for cost in costs if cost.standing == best]
    least = min(cost.total for cost in willing)
    equal = [cost for cost in willing if cost.total <= least + tie_seconds]
    fewest = min(cost.in_flight for cost in equal)
    idle = [cost for cost in equal if cost.in_flight == fewest]
    chosen = idle[rotation % len(idle)]
    reason = _reason(costs, best, equal)
    message = f"{chosen.instance_id}: {chosen.seconds:.4f} s predicted, {chosen.in_flight} in flight, of {len(costs)}"
    return Choice(chosen.instance_id, reason, message, tuple(costs))


def _reason(costs: Sequence[Cost], best: Standing, equal: Sequence[Cost]) -> str:
    if len(costs) == 1:
        return "OnlyCandidate"
    if best is not Standing.GOOD:
        return {Standing.FULL: "AllFull", Standing.UNKNOWN: "AllUnknown"}.get(best, "AllOverHighWater")
    return "LeastCost" if len(equal) == 1 else "FewestInFlight"


def is_fresh(load: EngineLoad | None, age_seconds: float | None, stale_after_seconds: float) -> bool:
    """Whether a load may be believed."""
    return load is not None and age_seconds is not None and age_seconds <= stale_after_seconds


def positive(value: float | None) -> float | None:
    """The value, unless it is unknown, not finite, or not above 0."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def median(values: Iterable[float]) -> float | None:
    """The middle one, or None of nothing. The lower of two: a guess should rather be slow than fast."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def none_serving_message(role: str, instances: Sequence[Instance], excluded: frozenset[str]) -> str:
    """Why no instance of `role` can take a request; those in `excluded` have failed it."""
    if not instances:
        return f"the service has no {role} instance"
    states = sorted({instance.state.value for instance in instances if instance.id not in excluded})
    told = f", the others are {', '.join(states)}" if states else ""
    failed = sum(instance.id in excluded for instance in instances)
    return f"no {role} instance can serve: {failed} of {len(instances)} failed this request{told}"
