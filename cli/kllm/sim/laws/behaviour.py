"""How fast the Kubernetes autoscaler lets a count change: stabilisation windows and rate policies. Pure.

Source: the `behavior` field of `HorizontalPodAutoscaler` (autoscaling/v2) as Kubernetes documents it. Of the
recommendations in a direction's window the most cautious holds; a policy limits the change within its period, counted
from what the count was when the period began; of several policies the one that allows most holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kllm.sim.laws.base import Bounds


@dataclass(frozen=True)
class Policy:
    """Most change within a period.

    Attributes:
        pods: instances, or
        percent: of the count at the beginning of the period.
    """

    period_seconds: float
    pods: int | None = None
    percent: float | None = None

    def highest(self, start: int) -> int:
        """The highest count that may follow on `start`."""
        return start + self.pods if self.pods is not None else math.ceil(start * (1 + (self.percent or 0.0) / 100))

    def lowest(self, start: int) -> int:
        """The lowest count that may follow on `start`."""
        return start - self.pods if self.pods is not None else math.floor(start * (1 - (self.percent or 0.0) / 100))


@dataclass(frozen=True)
class Rules:
    """One direction: the window over which the most cautious recommendation holds, and the rate policies."""

    stabilisation_seconds: float
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class Behaviour:
    """Both directions. The defaults are those of Kubernetes."""

    up: Rules = Rules(0.0, (Policy(15.0, percent=100.0), Policy(15.0, pods=4)))
    down: Rules = Rules(300.0, (Policy(15.0, percent=100.0),))

    @classmethod
    def stabilised(cls, *, up_seconds: float, down_seconds: float) -> Behaviour:
        """The rates of Kubernetes with these windows."""
        up, down = cls.up.policies, cls.down.policies
        return cls(Rules(up_seconds, up), Rules(down_seconds, down))


class Shaper:
    """Applies a behaviour to one pool and remembers what it recommended and changed."""

    def __init__(self, behaviour: Behaviour, bounds: Bounds) -> None:
        self._behaviour, self._bounds = behaviour, bounds
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def shape(self, now: float, *, current: int, recommended: int) -> int:
        """The count that follows on `current`, when the law recommends another."""
        stable = self._stabilised(now, current, recommended)
        limited = self._limited(now, current, stable)
        count = self._bounds.clamp(limited)
        if count != current:
            self._changes.append((now, count - current))
        return count

    def _stabilised(self, now: float, current: int, recommended: int) -> int:
        up, down = self._behaviour.up.stabilisation_seconds, self._behaviour.down.stabilisation_seconds
        self._recommended.append((now, recommended))
        self._recommended = [each for each in self._recommended if each[0] > now - max(up, down) or each[0] == now]
        lowest = min(count for at, count in self._recommended if at > now - up or at == now)
        highest = max(count for at, count in self._recommended if at > now - down or at == now)
        return min(max(current, lowest), highest)

    def _limited(self, now: float, current: int, wanted: int) -> int:
        if wanted > current:
            policies = self._behaviour.up.policies
            limits = [policy.highest(self._before(now, policy, current)) for policy in policies]
            return max(current, min(wanted, max(limits, default=wanted)))
        if wanted < current:
            policies = self._behaviour.down.policies
            limits = [policy.lowest(self._before(now, policy, current)) for policy in policies]
            return min(current, max(wanted, min(limits, default=wanted)))
        return current

    def _before(self, now: float, policy: Policy, current: int) -> int:
        """The count when the policy's period began."""
        longest = max(each.period_seconds for each in (*self._behaviour.up.policies, *self._behaviour.down.policies))
        self._changes = [each for each in self._changes if each[0] > now - longest]
        return current - sum(change for at, change in self._changes if at > now - policy.period_seconds)
