"""What is asked of the fleet: what was measured at the edge, what is forecast, and when capacity changed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kllm_core.objectives import Role

_ABSURD = 1e12
"""No rate, count or time of one service reaches this; such a number is a fault of whoever told it."""


def known(value: float | None) -> float | None:
    """The value, unless it is None, NaN, infinite, negative or absurd."""
    return value if value is not None and math.isfinite(value) and 0 <= value < _ABSURD else None


def uncached(prompt_tokens: float, cached_tokens: float) -> float:
    """Tokens that are left to compute of a prompt: at least its last one, whose output is the first token."""
    return max(1.0, prompt_tokens - cached_tokens)


@dataclass(frozen=True)
class Measurement:
    """The objective's percentile of one stage over a sliding window.

    Attributes:
        seconds: the percentile.
        oldest_age_seconds: of the oldest request in it.
        newest_age_seconds: of the newest request in it.
        samples: requests in it.
    """

    seconds: float
    oldest_age_seconds: float
    newest_age_seconds: float
    samples: int

    def believed(
        self, *, changed_age_seconds: float | None, stale_after_seconds: float, least_samples: int
    ) -> float | None:
        """The percentile, or None where it says nothing of the capacity there is now.

        Args:
            changed_age_seconds: since the last change of capacity; None when there was none.
            stale_after_seconds: without a newer request it is old news.
            least_samples: fewer are chance.
        """
        oldest, newest = known(self.oldest_age_seconds), known(self.newest_age_seconds)
        if oldest is None or newest is None or newest > stale_after_seconds or self.samples < least_samples:
            return None
        if changed_age_seconds is not None and not oldest <= changed_age_seconds:
            return None
        return known(self.seconds)


@dataclass(frozen=True)
class Stages:
    """Where requests spend their time, as the routers see it; None is unmeasured.

    Attributes:
        queue: waiting on prefill.
        prefill: computing there.
        blocked: the part of `queue` in which prefill computed nothing because parked KV was at its limit.
        bind: choosing a decode instance and the handshake.
        admission: waiting for room on decode.
        transfer: moving the KV.
        first_step: from the KV's arrival to the first token.
        tpot: per output token after the first.
        prefilled: queue and prefill of one request together; the percentile of a sum is less than the percentiles' sum.
        handover: bind, transfer and first step of one request together.
    """

    queue: Measurement | None = None
    prefill: Measurement | None = None
    blocked: Measurement | None = None
    bind: Measurement | None = None
    admission: Measurement | None = None
    transfer: Measurement | None = None
    first_step: Measurement | None = None
    tpot: Measurement | None = None
    prefilled: Measurement | None = None
    handover: Measurement | None = None


@dataclass(frozen=True)
class Totals:
    """Sums since whoever counts began to; they never fall while it goes on.

    Attributes:
        at: of the last report in them, in seconds on the owner's clock.
        seconds: that they cover: of silence nothing is known.
        arrivals: requests that came, those that were rejected included.
        prompt_tokens: of those.
        ended: requests that ended with an answer.
        cached_tokens: prompt tokens of those that caches spared.
        output_tokens: of those.
        prompt_token_squares: sum of the squares of the arrived prompts' tokens; 0: nobody told.
    """

    at: float
    seconds: float = 0.0
    arrivals: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prompt_token_squares: int = 0


@dataclass(frozen=True)
class Forecast:
    """What arrives, or will; None is unknown, 0 is no traffic.

    Attributes:
        requests_per_second: the rate.
        uncached_tokens: prompt tokens to compute per request, mean.
        long_uncached_tokens: the same at the objective's percentile; None: the mean.
        cached_tokens: prompt tokens that caches spare per request, mean.
        output_tokens: per request, mean.
        accept_length: tokens per sequence and decode step.
        complete: whether all routers have told; if not, more may arrive than this.
        prompt_variation: squared coefficient of variation of the lengths of prompts; None is unknown.
        work_variation: index of dispersion of the work that arrives, over the mean work of a request: that of requests
            in a time, and the variation of their lengths. 2 where both are chance's: crowds of long prompts have more.
        totals: what rate and means come from; None: they count as seen as they are.
    """

    requests_per_second: float | None = None
    uncached_tokens: float | None = None
    long_uncached_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    accept_length: float = 1.0
    complete: bool = True
    prompt_variation: float | None = None
    work_variation: float = 2.0
    totals: Totals | None = None


@dataclass(frozen=True)
class Demand:
    """Forecast and measurements, at the moment of the fleet snapshot they are used with.

    Attributes:
        prefill_changed_age_seconds: since an instance began or ceased to serve; None: not within memory.
    """

    forecast: Forecast = field(default_factory=Forecast)
    stages: Stages = field(default_factory=Stages)
    prefill_changed_age_seconds: float | None = None
    decode_changed_age_seconds: float | None = None

    def changed_age_seconds(self, role: Role) -> float | None:
        """Since the last change of one role's capacity."""
        return self.prefill_changed_age_seconds if role is Role.PREFILL else self.decode_changed_age_seconds
