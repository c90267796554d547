"""What the planner would have done with a recorded history. No I/O.

Each moment is judged by the instances that there were, since what is decided here changes nothing there: it is the
advice that a service with `scaling: External` gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.fleet.levels import Levels
from kllm_operator.fleet.snapshot import snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.history.moment import Moment
from kllm_operator.loop.capacity import CapacityBook
from kllm_operator.loop.deciding import Deciding, Scaled
from kllm_operator.loop.events import load_document
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.demand import Forecast, Stages
from kllm_operator.plan.planner import Plan


@dataclass(frozen=True)
class Replayed:
    """What the planner would have done at one moment.

    Attributes:
        at: seconds since the first moment.
        recorded: what was carried out then.
        serving: instances of each role that served.
    """

    at: float
    recorded: DesiredCounts
    serving: Mapping[Role, int]
    plan: Plan

    @property
    def differs(self) -> bool:
        """Whether it would have done something else."""
        return any(self.plan.desired.of(role) != self.recorded.of(role) for role in Role)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        desired = self.plan.desired
        return {
            "at_seconds": round(self.at, 3),
            "desired": {role.value: desired.of(role) for role in Role},
            "recorded": {role.value: self.recorded.of(role) for role in Role},
            "serving": {role.value: self.serving[role] for role in Role},
            "reason": desired.reason,
            "message": desired.message,
            "loads": {load.role.value: load_document(load) for load in self.plan.loads},
        }


class Recalled:
    """What was heard, as the loop heard it. Implements `kllm_operator.loop.looking.Heard`."""

    def __init__(self, settings: LoopSettings) -> None:
        self._levels = Levels(settings.levels)
        self._told: Mapping[str, Told] = {}
        self._complete = True

    def take(self, moment: Moment) -> None:
        """Hear what was heard until a moment."""
        for report in moment.levels:
            self._levels.add(report)
        self._told, self._complete = moment.told, moment.complete

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""
        return self._told

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Nobody waits for what is long past."""

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Whoever was followed is recorded."""

    def forecast(self, now: float) -> Forecast:
        """What was to arrive."""
        return replace(self._levels.forecast(now), complete=self._complete)

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the capacity at that time took."""
        return self._levels.stages(now, percentile=percentile, changed_age_seconds=changed_age_seconds)


def replayed(moments: tuple[Moment, ...], scaled: Scaled, settings: LoopSettings) -> Iterator[Replayed]:
    """Decide at each moment.

    Args:
        moments: in the order of their times.
        scaled: the service, which may be another than the one that was recorded.
        settings: of the loop.
    """
    heard, book = Recalled(settings), CapacityBook(scaled.start_seconds)
    deciding = Deciding(replace(scaled, advise_only=True), settings, heard=heard, book=book)
    for moment in moments:
        heard.take(moment)
        seen = snapshot(moment.observed, moment.told, now=moment.at, trust=settings.trust)
        book.observe(seen.fleet, now=moment.at)
        asked = {role: moment.desired.of(role) for role in Role}
        plan = deciding.decide(seen, moment.at, limits=scaled.limits, asked=asked, advise=True)
        serving = {role: len(seen.fleet.serving(role)) for role in Role}
        yield Replayed(moment.at - moments[0].at, moment.desired, serving, plan)


def instance_seconds(steps: list[Replayed]) -> tuple[float, float]:
    """Time of the instances that were carried out, and of those that would have been asked for."""
    recorded, wanted = 0.0, 0.0
    for step, following in itertools.pairwise(steps):
        seconds = following.at - step.at
        recorded += seconds * sum(step.recorded.of(role) for role in Role)
        wanted += seconds * sum(step.plan.desired.of(role) for role in Role)
    return recorded, wanted
