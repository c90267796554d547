"""What the operator hears of a simulated service: its engines' loads and its router's service levels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from kllm.bench.row import Status
from kllm.sim.agenda import Agenda
from kllm.sim.fleet import Fleet
from kllm.sim.flights import Flight
from kllm_core.fleet import InstanceState
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_core.objectives import Role
from kllm_operator.fleet.levels import LevelReport, Levels, LevelSettings, StageCounts
from kllm_operator.fleet.told import Told
from kllm_operator.plan.demand import Forecast, Stages

_INTERVAL_SECONDS = 1.0
"""Between two reports, as the operator subscribes to them."""
_ROUTER = "router"
_BUCKETS = len(LATENCY_BOUNDS_SECONDS) + 1
_TOGETHER = {"prefilled": ("queue", "prefill"), "handover": ("bind", "transfer")}
"""Stages that the router also tells as one."""


class _Interval:
    """What the router counts until its next report."""

    def __init__(self) -> None:
        self.arrivals = self.prompt_tokens = self.cached_tokens = self.output_tokens = self.failed = self.rejected = 0
        self.prompt_token_squares = 0
        self.counts: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}

    @property
    def has_any(self) -> bool:
        return self.arrivals > 0 or bool(self.counts)

    def add(self, stage: str, seconds: float) -> None:
        counts = self.counts.setdefault(stage, [0] * _BUCKETS)
        counts[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def report(self, now: float) -> LevelReport:
        stages = {name: StageCounts(tuple(counts), self.seconds[name]) for name, counts in self.counts.items()}
        return LevelReport(
            _ROUTER, now, _INTERVAL_SECONDS, self.arrivals, self.prompt_tokens, self.cached_tokens,
            self.output_tokens, self.failed, self.rejected, stages, self.prompt_token_squares,
        )  # fmt: skip


class SimulatedHeard:
    """Tells what agents and routers would. Implements `kllm_operator.loop.looking.Heard` and `Listener` of requests.

    Args:
        agenda: of the simulation.
        fleet: whose engines tell.
        settings: over which time reports are taken together.
        hear: is given each report of the router.
    """

    def __init__(
        self,
        agenda: Agenda,
        fleet: Fleet,
        settings: LevelSettings,
        *,
        hear: Callable[[LevelReport], None],
    ) -> None:
        self._agenda, self._fleet, self._hear = agenda, fleet, hear
        self._levels = Levels(settings)
        self._interval = _Interval()
        self._told: dict[str, Told] = {}
        self._listeners: list[Callable[[], None]] = []
        agenda.at(0.0, self._tell)

    # --- requests

    def arrived(self, flight: Flight) -> None:
        """A request has come."""
        self._interval.arrivals += 1
        self._interval.prompt_tokens += flight.input_tokens
        self._interval.prompt_token_squares += flight.input_tokens**2

    def showed(self, flight: Flight) -> None:
        """Nothing is told before a request ends."""

    def ended(self, flight: Flight) -> None:
        """A request has ended, however it did."""
        interval = self._interval
        if flight.status is not Status.OK:
            interval.rejected += flight.status is Status.REJECTED
            interval.failed += flight.status is Status.FAILED
            return
        interval.cached_tokens += flight.cached_tokens
        interval.output_tokens += flight.output_tokens
        stages = flight.stages
        for stage, seconds in stages.items():
            interval.add(stage, seconds)
        for whole, parts in _TOGETHER.items():
            if all(part in stages for part in parts):
                interval.add(whole, sum(stages[part] for part in parts))

    # --- the loop

    @property
    def told(self) -> Mapping[str, Told]:
        """The last word of each agent, by instance."""
        return self._told

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each report that tells something new."""
        self._listeners.append(listener)

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Agents that are followed no more are forgotten; all others tell by themselves."""
        for name in self._told.keys() - addresses.keys():
            del self._told[name]

    def forecast(self, now: float) -> Forecast:
        """What will arrive."""
        return self._levels.forecast(now)

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """What requests of the present capacity took."""
        return self._levels.stages(now, percentile=percentile, changed_age_seconds=changed_age_seconds)

    def _tell(self) -> None:
        now = self._agenda.now
        is_news = self._interval.has_any
        for instance in self._fleet.instances.values():
            if instance.state in {InstanceState.SERVING, InstanceState.DRAINING} and instance.engine is not None:
                before, load = self._told.get(instance.id), instance.load(now)
                is_news = is_news or before is None or before.load is not load
                self._told[instance.id] = Told(
                    heard_at=now,
                    incarnation=instance.incarnation,
                    load=load,
                    flippable=self._fleet.alike and instance.engine.spec.flippable,
                    page_size=instance.engine.spec.block_tokens,
                )
        report = self._interval.report(now)
        self._levels.add(report)
        self._hear(report)
        self._interval = _Interval()
        for listener in self._listeners if is_news else ():
            listener()
        self._agenda.after(_INTERVAL_SECONDS, self._tell)
