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
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class TierCredit:
    """How much of a cached token's computation is saved, by tier: host and disk blocks must be loaded first."""

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25
    shared: float = 0.25

    def blocks(self, match: PrefixMatch) -> float:
        """Blocks that need not be computed."""
        return self.device * match.device + self.host * match.host + self.disk * match.disk + self.shared * match.shared


@dataclass(frozen=True)
class PrefillSettings:
    """How prefill instances are judged.

    Attributes:
        timing: what a step costs where no rate has been measured.
        chunk_tokens: tokens of one prefill step; a queue drains in such chunks.
        stale_after_seconds: an older load is unknown.
        max_queue_seconds: an instance with a longer queue takes nothing new.
        tie_seconds: predictions this close are equal.
    """

    timing: PrefillTiming = PRIOR.prefill
    credit: TierCredit = TierCredit()
    chunk_tokens: int = 2048
    stale_after_seconds: float = 3.0
    max_queue_seconds: float = 60.0
    tie_seconds: float = 0.001


@dataclass(frozen=True)
class PrefillCandidate:
    """One prefill instance as the router sees it.

    Attributes:
        age_seconds: of its load; None when it never told any.
        match: how much of this prompt it has cached.
        unreported_tokens: uncached prompt tokens that routers sent and its load cannot contain yet.
        in_flight: requests of these routers that it has.
    """

    instance: Instance
    age_seconds: float | None = None
    match: PrefixMatch = NO_MATCH
    unreported_tokens: int = 0
    in_flight: int = 0


def choose_prefill(
    candidates: Sequence[PrefillCandidate],
    *,
    prompt_tokens: int,
    settings: PrefillSettings = PrefillSettings(),
    rotation: int = 0,
    excluded: frozenset[str] = frozenset(),
) -> Choice | Refusal:
    """Pick the instance on which the first token is expected soonest.

    Cost = drain of its queue + prefill of the part that is not cached. Where an instance has not measured its rate,
    the median of those that have stands for it, so that one without a past is neither shunned nor overrun.

    Args:
        candidates: prefill instances in a stable order, in whatever state.
        prompt_tokens: at least 1.
        settings: how they are judged.
        rotation: a counter of the caller that makes equals take turns.
        excluded: ids that failed this request.
    """
    usable = [c for c in candidates if c.instance.takes_requests and c.instance.id not in excluded]
    if not usable:
        return Refusal(
            Refused.NONE_SERVING, none_serving_message("prefill", [c.instance for c in candidates], excluded)
        )
    queues = _queues(usable, settings)
    room = [queue for queue in queues if queue.drain_seconds <= settings.max_queue_seconds]
    if not room:
        excess = min(queue.drain_seconds for queue in queues) - settings.max_queue_seconds
        return Refusal(
            Refused.OVERLOADED,
            f"every prefill instance has more than {settings.max_queue_seconds:g} s of prompts queued",
            min(max(excess, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS),
        )
    costs = [
        Cost(
            queue.candidate.instance.id,
            _standing(queue.load),
            queue.drain_seconds + _prefill_seconds(queue, prompt_tokens, settings),
            queue.candidate.in_flight,
        )
        for queue in room
    ]
    return pick(costs, tie_seconds=settings.tie_seconds, rotation=rotation)


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


def _queues(candidates: Sequence[PrefillCandidate], settings: PrefillSettings) -> list[_Queue]:
    stale = settings.stale_after_seconds
    loads = [c.instance.load if is_fresh(c.instance.load, c.age_seconds, stale) else None for c in candidates]
    measured = [None if load is None else positive(load.prefill_tokens_per_second) for load in loads]
    usual = median(rate for rate in measured if rate is not None)
    queues = []
    for candidate, load, own in zip(candidates, loads, measured, strict=True):
        tokens = candidate.unreported_tokens + ((load.queued_uncached_tokens or 0) if load is not None else 0)
        rate = own or usual
        if rate is None:
            drain = settings.timing.drain_seconds(tokens, chunk_tokens=settings.chunk_tokens)
        else:
            drain = tokens / rate
        queues.append(_Queue(candidate, load, rate, drain))
    return queues


def _prefill_seconds(queue: _Queue, prompt_tokens: int, settings: PrefillSettings) -> float:
    candidate = queue.candidate
    saved = int(settings.credit.blocks(candidate.match) * candidate.instance.page_size)
    # The last token is always computed: its logits make the first output token.
    cached = min(saved, prompt_tokens - 1)
    if queue.rate is None:
        return settings.timing.seconds(prompt_tokens - cached, cached)
    return (prompt_tokens - cached) / queue.rate


def _standing(load: EngineLoad | None) -> Standing:
    if load is None:
        return Standing.UNKNOWN
    if load.parked_limit_tokens and (load.parked_tokens or 0) >= load.parked_limit_tokens:
        return Standing.FULL
    return Standing.GOOD
