"""What will be asked of both roles when capacity that is decided now serves. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from kllm_core.objectives import Role
from kllm_operator.plan.demand import Forecast, Totals, known, uncached
from kllm_operator.plan.lengths import Lengths
from kllm_operator.plan.tracks import Tracks

_LEAST_SECONDS = 0.5
"""Between two observations; reports come once a second, and shorter ones would see nothing or one request."""
_FIRST_SECONDS = 5.0
"""That the first look lasts, or counts for: a tick of the control loop. Nothing else is there to compare it with."""
_MOST_ABOVE = 2.0
"""Factor over the present and the expected rate above which nothing is provided for: who knows that little of what will
come is told by what comes."""
_RATE, _PROMPT, _CACHED, _OUTPUT = range(4)
_LEAST_UNCACHED = 0.02
"""Part of a prompt that counts as not cached at least."""
_VARIATION = (0.25, 10.0)
"""Bounds of variations: no real stream is as even as a clock, and few samples may look wild."""


def _unknown() -> Tracks:
    # A rate below one request in a hundred seconds, and lengths below a token, are as good as none.
    return Tracks.of(power=(1.0, 2.0, 2.0, 2.0), floor=(0.01, 1.0, 1.0, 1.0), noise=(1.0, 1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Outlook:
    """Demand ahead.

    Attributes:
        seconds: how far ahead.
        quantile: of `high`.
        level: requests per second by now, without chance.
        expected: the same at that time.
        high: what it will not exceed with the probability of `quantile`, as a rate of requests of the expected
            lengths, by role: for prefill it has the uncertainty of prompts and cache hits in it, for decode that of
            answers.
        highest: what it will not exceed from now until then, with the higher probability that is asked of who gives up
            instances.
        prompt_tokens, cached_tokens, output_tokens: expected per request; None is unknown.
        prompt_variation, work_variation: see `Forecast`.
    """

    seconds: float
    quantile: float
    level: float
    expected: float
    high: Mapping[Role, float]
    highest: Mapping[Role, float]
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    prompt_variation: float | None = None
    work_variation: float = 2.0

    def by_now(self, present: Forecast) -> Forecast:
        """What is asked at present; an unknown rate stays unknown."""
        return present if known(present.requests_per_second) is None else self._as(self.level, present)

    def asked(self, role: Role, present: Forecast, *, lasting: bool, spare: float) -> Forecast:
        """What the role must be able to take.

        Args:
            role: that is judged.
            present: what is not foreseen is as it is there; an unknown rate stays unknown.
            lasting: from now until then, and not only then.
            spare: part by which it may be more.
        """
        if known(present.requests_per_second) is None:
            return present
        return self._as((self.highest if lasting else self.high)[role] * (1 + spare), present)

    def _as(self, rate: float, present: Forecast) -> Forecast:
        asked = replace(
            present,
            requests_per_second=rate,
            prompt_variation=self.prompt_variation,
            work_variation=self.work_variation,
        )
        if self.prompt_tokens is not None:
            cached = self.cached_tokens or 0.0
            asked = replace(asked, uncached_tokens=uncached(self.prompt_tokens, cached), cached_tokens=cached)
        return asked if self.output_tokens is None else replace(asked, output_tokens=self.output_tokens)


@dataclass(frozen=True)
class Course:
    """The course that demand has taken so far.

    Attributes:
        at: of the last observation, in seconds on the clock of whoever observes; None before the first.
        totals: of the last observation.
        lengths: of single prompts.
    """

    tracks: Tracks = field(default_factory=_unknown)
    at: float | None = None
    totals: Totals | None = None
    lengths: Lengths = field(default_factory=Lengths)

    def observe(self, forecast: Forecast, now: float) -> Course:
        """Take what arrived since the last time. Silence, nonsense and time that does not go on teach nothing."""
        rate = known(forecast.requests_per_second)
        at = now if forecast.totals is None else forecast.totals.at
        if rate is None or not math.isfinite(at):
            return self
        if self.at is None or at < self.at or _restarted(self.totals, forecast.totals):
            begun = replace(self, at=at, totals=forecast.totals)
            return begun if forecast.totals is not None else begun._seen(forecast, rate, at, _FIRST_SECONDS)
        seconds = at - self.at
        least = _LEAST_SECONDS if self.tracks.seen[_RATE] else _FIRST_SECONDS
        return self._seen(forecast, rate, at, seconds) if seconds >= least else self

    def ahead(self, seconds: float, quantile: float, keep_quantile: float = 0.99) -> Outlook | None:
        """Demand so many seconds from now; None before anything was observed.

        Args:
            seconds: ahead.
            quantile: of `high`.
            keep_quantile: of `highest`, which is no less than `high`.
        """
        if not self.tracks.seen[_RATE]:
            return None
        by_now, then = self.tracks.ahead(0.0), self.tracks.ahead(seconds)
        high = _high(then, quantile)
        crowds, lengths = (float(np.clip(self.tracks.noise[each], *_VARIATION)) for each in (_RATE, _PROMPT))
        told = self.lengths.variation
        prompts = told if told is not None else lengths if self.tracks.seen[_PROMPT] else None
        seen = [float(then[0][index]) if self.tracks.seen[index] else None for index in range(4)]
        hardly = [_high(estimate, max(quantile, keep_quantile)) for estimate in (by_now, then)]
        return Outlook(
            seconds=seconds,
            quantile=quantile,
            level=float(by_now[0][_RATE]),
            expected=float(then[0][_RATE]),
            high=high,
            highest={role: max(each[role] for each in hardly) for role in Role},
            prompt_tokens=seen[_PROMPT],
            cached_tokens=seen[_CACHED],
            output_tokens=seen[_OUTPUT],
            prompt_variation=None if prompts is None else min(prompts, _VARIATION[1]),
            work_variation=crowds + lengths,
        )

    def _seen(self, forecast: Forecast, rate: float, at: float, seconds: float) -> Course:
        if forecast.totals is not None and self.totals is not None:
            values, exposures = _between(self.totals, forecast.totals)
        else:
            values, exposures = _as_told(forecast, rate, seconds)
        tracks = self.tracks.observe(np.array(values), np.array(exposures), seconds=seconds)
        lengths = self.lengths
        if forecast.totals is not None and self.totals is not None:
            lengths = lengths.seen(self.totals, forecast.totals)
        return Course(tracks, at, forecast.totals, lengths)


def _restarted(before: Totals | None, after: Totals | None) -> bool:
    if before is None or after is None:
        return before is not after
    return after.arrivals < before.arrivals or after.ended < before.ended


def _between(before: Totals, after: Totals) -> tuple[list[float], list[float]]:
    seconds = max(0.0, after.seconds - before.seconds)
    arrivals, ended = after.arrivals - before.arrivals, after.ended - before.ended
    sums = (after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens)
    output = after.output_tokens - before.output_tokens
    values = [
        arrivals / seconds if seconds else 0.0,
        sums[0] / max(1, arrivals),
        sums[1] / max(1, ended),
        output / max(1, ended),
    ]
    return [max(0.0, each) for each in values], [seconds, arrivals, ended, ended]


def _as_told(forecast: Forecast, rate: float, seconds: float) -> tuple[list[float], list[float]]:
    uncached, cached = known(forecast.uncached_tokens), known(forecast.cached_tokens)
    output = known(forecast.output_tokens)
    prompt = None if uncached is None else uncached + (cached or 0.0)
    lengths = (prompt, cached, output)
    requests = rate * seconds
    return (
        [rate, *(each or 0.0 for each in lengths)],
        [seconds, *(0.0 if each is None else requests for each in lengths)],
    )


def _high(estimate: tuple[np.ndarray, np.ndarray], quantile: float) -> dict[Role, float]:
    mean, deviation = ([float(each) for each in part] for part in estimate)
    rate = mean[_RATE]
    # Of a prompt that caches spare as a whole, a part is still to be computed: what was not seen may come.
    uncached = max(mean[_PROMPT] - mean[_CACHED], mean[_PROMPT] * _LEAST_UNCACHED, 1.0)
    off = {
        Role.PREFILL: math.hypot(deviation[_PROMPT], deviation[_CACHED]) / uncached,
        Role.DECODE: deviation[_OUTPUT] / max(mean[_OUTPUT], 1.0),
    }
    distance = NormalDist().inv_cdf(quantile)
    above = {role: distance * math.hypot(deviation[_RATE], rate * off[role]) for role in Role}
    return {role: max(0.0, rate + min(above[role], rate * (_MOST_ABOVE - 1))) for role in Role}
