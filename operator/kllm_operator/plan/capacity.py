"""What a change of capacity costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_operator.plan.demand import known


@dataclass(frozen=True)
class CapacityTimes:
    """What a change of capacity costs, in seconds of one instance; None is unmeasured.

    Attributes:
        start_seconds: from the decision to serving, by the way that is open now.
        drain_seconds: until an instance is empty.
        switch_seconds: from empty to serving in the other role.
        lost_cache_seconds: prefill time that the prefix cache would have spared.
    """

    start_seconds: float | None = None
    drain_seconds: float | None = None
    switch_seconds: float | None = None
    lost_cache_seconds: float | None = None

    @property
    def flip_is_cheaper(self) -> bool:
        """Whether drain + switch + lost cache costs less than start + drain; the unknown is never cheaper."""
        start, drain = known(self.start_seconds), known(self.drain_seconds)
        switch, cache = known(self.switch_seconds), known(self.lost_cache_seconds)
        if start is None or drain is None or switch is None or cache is None:
            return False
        return drain + switch + cache < start + drain
