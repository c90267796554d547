"""The count that the Kubernetes autoscaler recommends for one metric. Pure.

Source: "Horizontal Pod Autoscaling" of the Kubernetes documentation, section on the algorithm:
desired = ceil(current · metric / target), no change while |metric / target - 1| is within the tolerance. Pods without a
metric count as 0 when it would scale up and as exactly at the target when it would scale down; if that turns the
direction, nothing changes. kthena's per-role recommendation has the same rules.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kllm.sim.laws.base import EngineView, Pool, PoolView


class Metric(enum.StrEnum):
    """What of an engine is compared with a target."""

    CONCURRENCY = "concurrency"
    """Requests that it has, running and queued."""
    QUEUE = "queue"
    """Requests without a place in a batch."""
    TOKENS = "tokens"
    """Prompt tokens that must still be computed."""
    KV = "kv"
    """Share of its KV pool in use, 0 to 1."""
    UTILISATION = "utilisation"
    """Share of time in which it computes, 0 to 1."""

    def of(self, engine: EngineView) -> float:
        """The metric of one engine."""
        match self:
            case Metric.CONCURRENCY:
                return float(engine.requests)
            case Metric.QUEUE:
                return float(engine.queued_requests)
            case Metric.TOKENS:
                return float(engine.queued_tokens)
            case Metric.KV:
                return engine.kv_use
            case Metric.UTILISATION:
                return engine.utilisation

    def mean(self, pool: PoolView) -> float:
        """The mean over the serving engines; 0 without any."""
        return sum(self.of(engine) for engine in pool.engines) / pool.serving if pool.engines else 0.0


@dataclass(frozen=True)
class Targets:
    """What each pool is scaled by; knobs that laws have in common, whose defaults they may change.

    Attributes:
        metric: of pool one and of decode.
        target: of that metric, per engine.
        prefill_metric: of prefill.
        prefill_target: of that metric, per engine.
    """

    metric: Metric = Metric.CONCURRENCY
    target: float = 32.0
    prefill_metric: Metric = Metric.QUEUE
    prefill_target: float = 2.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.prefill_target <= 0:
            raise ValueError(f"targets must be above 0, got {self.target} and {self.prefill_target}")

    def of(self, pool: Pool) -> tuple[Metric, float]:
        """Metric and target of a pool."""
        return (self.prefill_metric, self.prefill_target) if pool is Pool.PREFILL else (self.metric, self.target)


def per_pod(values: Sequence[float], *, target: float, current: int, tolerance: float) -> int:
    """Count recommended from a metric that each serving pod reports.

    Args:
        values: of the pods that serve.
        target: value that a pod should have.
        current: count last decided; those of it without a value are missing.
        tolerance: of the ratio, 0.1 for 10 %.
    """
    if not values:
        return current
    missing = max(0, current - len(values))
    ratio = sum(values) / len(values) / target
    if missing == 0:
        return current if _near(ratio, tolerance) else math.ceil(ratio * len(values) - 1e-9)
    pods = len(values) + missing
    filled = sum(values) + (missing * target if ratio < 1 else 0.0)
    again = filled / pods / target
    if _near(again, tolerance) or (ratio < 1) != (again < 1):
        return current
    count = math.ceil(again * pods - 1e-9)
    return current if (again < 1) == (count > current) and count != current else count


def external(value: float, *, target: float, current: int, tolerance: float) -> int:
    """Count recommended from one value of the whole pool, of which each pod should have `target`."""
    if current > 0 and _near(value / (target * current), tolerance):
        return current
    return math.ceil(value / target - 1e-9)


def _near(ratio: float, tolerance: float) -> bool:
    return 1 - tolerance <= ratio <= 1 + tolerance
