"""What routers told of their clients, over sliding windows: demand and measured stages. No clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kllm_core.objectives import Role
from kllm_operator.fleet.histogram import percentile_seconds, total
from kllm_operator.plan.demand import Forecast, Measurement, Stages, Totals, uncached

_ROLES = {
    "queue": Role.PREFILL,
    "prefill": Role.PREFILL,
    "prefilled": Role.PREFILL,
    "bind": Role.DECODE,
    "transfer": Role.DECODE,
    "handover": Role.DECODE,
    "tpot": Role.DECODE,
}
"""Stages that loads are made of, and the role whose capacity they depend on."""


@dataclass(frozen=True)
class StageCounts:
    """Requests of one stage by their time, and the sum of their times in seconds."""

    counts: tuple[int, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class LevelReport:
    """What one router saw in one interval.

    Attributes:
        router: its id.
        at: when it came; seconds on the owner's clock.
        seconds: length of the interval.
        prompt_token_squares: sum of the squares of the arrived prompts' tokens; 0: not told.
        stages: by name: queue, prefill, both together as prefilled, bind, transfer, both as handover, ttft, tpot.
        waiting: requests that wait for instances to start since none serves.
        unshared: why it does not hear other routers though it is to; empty when it does.
    """

    router: str
    at: float
    seconds: float
    arrivals: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    rejected: int = 0
    stages: Mapping[str, StageCounts] = field(default_factory=dict)
    prompt_token_squares: int = 0
    waiting: int = 0
    unshared: str = ""


@dataclass(frozen=True)
class LevelSettings:
    """Over which time routers' reports are taken together."""

    fast_seconds: float = 10.0
    """Seconds of the newer rate of arrivals, 10. Shorter is mostly chance."""
    window_seconds: float = 30.0
    """Seconds of the older rate and of measured stages, 30. Longer keeps what is spent, shorter has few requests."""
    silent_seconds: float = 5.0
    """Seconds without a report after which nothing is known of the present, 5."""
    sampling_errors: float = 2.0
    """Standard errors that a percentile is taken lower by, 2: of 400 requests four are above the 99th percentile, and
    whether four or eight are is chance. Lower starts instances for that; higher overlooks what is slow."""
    mean_requests: int = 20
    """Requests whose mean length counts, 20, if the window has more: the work may have changed since those before."""


class Levels:
    """Reports of all routers of a service.

    Means of the last requests are kept while none ends, since a rate alone would tell nothing.
    """

    def __init__(self, settings: LevelSettings | None = None) -> None:
        self._settings = settings or LevelSettings()
        self._reports: deque[LevelReport] = deque()
        self._prompt: float | None = None
        self._cached: float | None = None
        self._output: float | None = None
        self._duration = 0.0
        self._totals: Totals | None = None

    def add(self, report: LevelReport) -> None:
        """Take a report; they come in the order of their times."""
        self._reports.append(report)
        while self._reports[0].at < report.at - self._settings.window_seconds:
            self._reports.popleft()
        routers = len({each.router for each in self._reports if report.at - each.at <= self._settings.silent_seconds})
        self._totals = _with(self._totals, report, routers)
        self._remember()

    def forecast(self, now: float) -> Forecast:
        """What will arrive, if it goes on as in the busier of the two windows; unknown while routers are silent."""
        if not self._reports or now - self._reports[-1].at > self._settings.silent_seconds:
            return Forecast()
        rates = [self._rate(now, seconds) for seconds in (self._settings.fast_seconds, self._settings.window_seconds)]
        # Whoever waits for a start is still to be served, however long ago that was.
        rates.append(self._waiting(now) / self._settings.window_seconds)
        prompt, cached = self._prompt, self._cached
        return Forecast(
            requests_per_second=max(rates),
            uncached_tokens=None if prompt is None else uncached(prompt, cached or 0.0),
            cached_tokens=cached,
            output_tokens=self._output,
            totals=self._totals,
        )

    def stages(self, now: float, *, percentile: int, changed_age_seconds: Callable[[Role], float | None]) -> Stages:
        """The percentile of each stage, of requests that came after the last change of the capacity they met."""
        measured = {}
        for name, role in _ROLES.items():
            age = changed_age_seconds(role)
            measured[name] = self._measured(name, now, percentile=percentile, youngest=age)
        return Stages(**measured)

    def _measured(self, name: str, now: float, *, percentile: int, youngest: float | None) -> Measurement | None:
        # A request is told of when it ends; it met the capacity that there was when it came.
        reports = [each for each in self._since(now, youngest, spare=self._duration) if name in each.stages]
        counts = total(each.stages[name].counts for each in reports)
        seconds = percentile_seconds(counts, self._surely(percentile, sum(counts)))
        if seconds is None:
            return None
        oldest = now - reports[0].at + reports[0].seconds + self._duration
        return Measurement(seconds, oldest, now - reports[-1].at, sum(counts))

    def _surely(self, percentile: int, samples: int) -> float:
        """The percentile of the samples that the true one is not below, but for `sampling_errors`."""
        share = percentile / 100
        error = math.sqrt(share * (1 - share) / max(1, samples))
        return 100 * max(share - self._settings.sampling_errors * error, min(share, 0.5))

    def _since(self, now: float, age: float | None, *, spare: float) -> list[LevelReport]:
        if age is None:
            return list(self._reports)
        return [each for each in self._reports if now - each.at + each.seconds + spare <= age]

    def _rate(self, now: float, seconds: float) -> float:
        recent = [each for each in self._reports if now - each.at < seconds]
        covered: dict[str, float] = {}
        arrivals: dict[str, int] = {}
        for each in recent:
            covered[each.router] = covered.get(each.router, 0.0) + each.seconds
            arrivals[each.router] = arrivals.get(each.router, 0) + each.arrivals
        # A router that has told less than the window is new, and had no clients before.
        return sum(arrivals[router] / max(covered[router], seconds) for router in covered)

    def _waiting(self, now: float) -> int:
        last = {each.router: each for each in self._reports}
        return sum(each.waiting for each in last.values() if now - each.at <= self._settings.silent_seconds)

    def _remember(self) -> None:
        arrived, arrivals = self._newest(lambda each: each.arrivals)
        if arrivals:
            self._prompt = sum(each.prompt_tokens for each in arrived) / arrivals
        over, ended = self._newest(_ended)
        if ended:
            self._cached = sum(each.cached_tokens for each in over) / ended
            self._output = sum(each.output_tokens for each in over) / ended
            self._duration = _mean(over, "ttft") + _mean(over, "tpot") * self._output

    def _newest(self, requests: Callable[[LevelReport], int]) -> tuple[list[LevelReport], int]:
        """The newest reports that have enough requests of a kind, and how many they have."""
        taken: list[LevelReport] = []
        count = 0
        for each in reversed(self._reports):
            taken.append(each)
            count += requests(each)
            if count >= self._settings.mean_requests:
                break
        return taken, count


def _ended(report: LevelReport) -> int:
    return sum(report.stages["ttft"].counts) if "ttft" in report.stages else 0


def _with(totals: Totals | None, report: LevelReport, routers: int) -> Totals:
    before = totals or Totals(report.at)
    return Totals(
        at=max(before.at, report.at),
        seconds=before.seconds + report.seconds / routers,
        arrivals=before.arrivals + report.arrivals,
        prompt_tokens=before.prompt_tokens + report.prompt_tokens,
        prompt_token_squares=before.prompt_token_squares + report.prompt_token_squares,
        ended=before.ended + _ended(report),
        cached_tokens=before.cached_tokens + report.cached_tokens,
        output_tokens=before.output_tokens + report.output_tokens,
    )


def _mean(reports: list[LevelReport], name: str) -> float:
    told = [each.stages[name] for each in reports if name in each.stages]
    samples = sum(total(each.counts for each in told))
    return sum(each.seconds for each in told) / samples if samples else 0.0
