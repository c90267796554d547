"""Choice of the prefill instance: the least predicted time to first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kllm_core.fleet import EngineLoad, Instance
from kllm_core.timing import PRIOR, PrefillTiming
from kllm_router.scheduling.choices import (
    Choice,
    Cost,
    Refusal,
    Refused,
    Standing,
    is_fresh,
    median,
    none_serving_message,
    pick,
    positive,
)
from kllm_router.scheduling.learning import PrefillLearner
from kllm_router.scheduling.prefix import ASSUMED_CREDIT, NO_MATCH, PrefixMatch, TierCredit

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class PrefillSettings:
    """How prefill instances are judged.

    Attributes:
        timing: what a step costs where no rate has been measured.
        chunk_tokens: tokens of one prefill step; a queue drains in such chunks.
        stale_after_seconds: an older load is unknown.
        max_queue_seconds: an instance with a longer queue takes nothing new.
        tie_seconds: predictions this close are equal.
        most_pressure: share of an instance's time up to which its price grows.
        thrift: seconds of waiting that are taken to spare a second of work which only this request has use for.
        learned_prompts: that must have been learned from before the learned timing goes before measured rates.
    """

    timing: PrefillTiming = PRIOR.prefill
    credit: TierCredit = ASSUMED_CREDIT
    chunk_tokens: int = 2048
    stale_after_seconds: float = 3.0
    max_queue_seconds: float = 60.0
    tie_seconds: float = 0.001
    most_pressure: float = 0.9
    thrift: float = 6.0
    learned_prompts: int = 32


class PrefillCandidate(NamedTuple):
    """One prefill instance as the router sees it.

    Attributes:
        age_seconds: of its load; None when it never told any.
        match: how much of this prompt it has cached.
        unreported_tokens: uncached prompt tokens that routers sent and its load cannot contain yet.
        in_flight: requests of these routers that it has.
        pace: seconds per uncached token of what this router has in flight there; None without any.
        pressure: share of its time that it needs for what it gets lately.
    """

    instance: Instance
    age_seconds: float | None = None
    match: PrefixMatch = NO_MATCH
    unreported_tokens: int = 0
    in_flight: int = 0
    pace: float | None = None
    pressure: float = 0.0


def choose_prefill(
    candidates: Sequence[PrefillCandidate],
    *,
    prompt_tokens: int,
    settings: PrefillSettings = PrefillSettings(),
    learned: PrefillLearner | None = None,
    heat: float = 0.0,
    rotation: int = 0,
    excluded: frozenset[str] = frozenset(),
) -> Choice | Refusal:
    """Pick the instance on which the first token is expected soonest, with regard for those that come later.

    Cost = drain of its queue + own + price, where own is the computation of what is not cached, a + b·n + k·n·(n + 2c).
    The price is own · (p / (1 - p) + thrift / (1 + heat)): work w on a server that is busy for a share p of its time
    delays those that come later by w·p / (1 - p) in all; and what is computed twice takes time and room in caches from
    the whole fleet. A second copy of a much used prefix is soon paid for, so that thrift does not hold it back: an
    instance that such a prefix keeps busy becomes dear before it has a queue, and the prefix is computed elsewhere too.

    Where an instance has not measured its rate, the median of those that have stands for it, so that one without a past
    is neither shunned nor overrun.

    Args:
        candidates: prefill instances in a stable order, in whatever state.
        prompt_tokens: at least 1.
        settings: how they are judged.
        learned: what prompts took on instances of this kind.
        heat: prompts of the last minute that begin with what some instance has cached of this one.
        rotation: a counter of the caller that makes equals take turns.
        excluded: ids that failed this request.
    """
    usable = [c for c in candidates if c.instance.takes_requests and c.instance.id not in excluded]
    if not usable:
        return Refusal(
            Refused.NONE_SERVING, none_serving_message("prefill", [c.instance for c in candidates], excluded)
        )
    known = learned if learned is not None and learned.prompts >= settings.learned_prompts else None
    queues = _queues(usable, settings, known)
    room = [queue for queue in queues if queue.drain_seconds <= settings.max_queue_seconds]
    if not room:
        excess = min(queue.drain_seconds for queue in queues) - settings.max_queue_seconds
        return Refusal(
            Refused.OVERLOADED,
            f"every prefill instance has more than {settings.max_queue_seconds:g} s of prompts queued",
            min(max(excess, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS),
        )
    return pick(
        [_cost(queue, prompt_tokens, settings, known, thrift=settings.thrift / (1.0 + heat)) for queue in room],
        tie_seconds=settings.tie_seconds,
        rotation=rotation,
    )


def own_seconds(
    timing: PrefillTiming, credit: TierCredit, match: PrefixMatch, *, page_size: int, prompt_tokens: int
) -> float:
    """Time to compute what is not cached of a prompt."""
    cached = _credited(credit, match, page_size=page_size, prompt_tokens=prompt_tokens)
    return timing.seconds(prompt_tokens - cached, cached)


def _credited(credit: TierCredit, match: PrefixMatch, *, page_size: int, prompt_tokens: int) -> int:
    """Tokens of a prompt that need not be computed, as it were: the last one always is, for the first output token."""
    return min(int(credit.blocks(match) * page_size), prompt_tokens - 1)


class _Queue(NamedTuple):
    """A candidate with what is derived from its load.

    Attributes:
        load: None when it is unknown or stale.
        rate: tokens per second, its own or the usual one; None when nobody has measured any.
    """

    candidate: PrefillCandidate
    load: EngineLoad | None
    rate: float | None
    drain_seconds: float


def _queues(
    candidates: Sequence[PrefillCandidate], settings: PrefillSettings, learned: PrefillLearner | None
) -> list[_Queue]:
    stale = settings.stale_after_seconds
    loads = [c.instance.load if is_fresh(c.instance.load, c.age_seconds, stale) else None for c in candidates]
    measured = [None if load is None else positive(load.prefill_tokens_per_second) for load in loads]
    usual = median(rate for rate in measured if rate is not None)
    timing = settings.timing if learned is None else learned.timing
    queues = []
    for candidate, load, own in zip(candidates, loads, measured, strict=True):
        tokens = candidate.unreported_tokens + ((load.queued_uncached_tokens or 0) if load is not None else 0)
        rate = own or usual
        if rate is None and candidate.pace is None:
            drain = timing.drain_seconds(tokens, chunk_tokens=settings.chunk_tokens)
        else:
            # The rate is of prompts that are done. Where longer ones wait now, their own prediction is slower.
            drain = tokens * max(0.0 if rate is None else 1 / rate, candidate.pace or 0.0)
        queues.append(_Queue(candidate, load, rate, drain + _step_rest_seconds(load)))
    return queues


def _step_rest_seconds(load: EngineLoad | None) -> float:
    """Until the step that goes on is over: half of one, where something is computed. Its tokens are queued no more."""
    if load is None or not load.running_requests:
        return 0.0
    return (positive(load.prefill_step_seconds) or 0.0) / 2


def _cost(
    queue: _Queue, prompt_tokens: int, settings: PrefillSettings, learned: PrefillLearner | None, *, thrift: float
) -> Cost:
    candidate = queue.candidate
    match, page_size = candidate.match, candidate.instance.page_size
    if learned is None and queue.rate is not None:
        cached = _credited(settings.credit, match, page_size=page_size, prompt_tokens=prompt_tokens)
        own = (prompt_tokens - cached) / queue.rate
    else:
        known = settings if learned is None else learned
        own = own_seconds(known.timing, known.credit, match, page_size=page_size, prompt_tokens=prompt_tokens)
    pressure = min(candidate.pressure, settings.most_pressure)
    return Cost(
        candidate.instance.id,
        _standing(queue.load),
        queue.drain_seconds + own,
        candidate.in_flight,
        price=own * (pressure / (1.0 - pressure) + thrift),
        own_seconds=own,
    )


def _standing(load: EngineLoad | None) -> Standing:
    if load is None:
        return Standing.UNKNOWN
    if load.parked_limit_tokens and (load.parked_tokens or 0) >= load.parked_limit_tokens:
        return Standing.FULL
    return Standing.GOOD
