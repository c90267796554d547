"""Choice of the prefill instance: the least predicted time to first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kllm_core.fleet import Instance
from kllm_core.timing import PRIOR, PrefillTiming
from kllm_router.scheduling.choices import (
    Choice,
    Cost,
    Refusal,
    Refused,
    Standing,
    is_fresh,
    median,
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
        unreported_tokens: uncached prompt tokens that this router sent and its load cannot contain yet.
        in_flight: requests of this router that it has.
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
        return Refusal(Refused.NONE_SERVING, _none_message(candidates, excluded))
    usual = median(rate for c in usable if (rate := _measured_rate(c, settings)) is not None)
    drains = {c.instance.id: _drain_seconds(c, settings, usual) for c in usable}
    room = [c for c in usable if drains[c.instance.id] <= settings.max_queue_seconds]
    if not room:
        excess = min(drains.values()) - settings.max_queue_seconds
        return Refusal(
            Refused.OVERLOADED,
            f"every prefill instance has more than {settings.max_queue_seconds:g} s of prompts queued",
            min(max(excess, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS),
        )
    costs = [
        Cost(
            c.instance.id,
            _standing(c, settings),
            drains[c.instance.id] + _prefill_seconds(c, prompt_tokens, settings, usual),
            c.in_flight,
        )
        for c in room
    ]
    return pick(costs, tie_seconds=settings.tie_seconds, rotation=rotation)


def _measured_rate(candidate: PrefillCandidate, settings: PrefillSettings) -> float | None:
    load = candidate.instance.load
    if load is None or not is_fresh(load, candidate.age_seconds, settings.stale_after_seconds):
        return None
    return positive(load.prefill_tokens_per_second)


def _drain_seconds(candidate: PrefillCandidate, settings: PrefillSettings, usual: float | None) -> float:
    load = candidate.instance.load
    tokens = candidate.unreported_tokens
    if load is not None and is_fresh(load, candidate.age_seconds, settings.stale_after_seconds):
        tokens += load.queued_uncached_tokens or 0
    rate = _measured_rate(candidate, settings) or usual
    return tokens / rate if rate else settings.timing.drain_seconds(tokens, chunk_tokens=settings.chunk_tokens)


def _prefill_seconds(
    candidate: PrefillCandidate, prompt_tokens: int, settings: PrefillSettings, usual: float | None
) -> float:
    saved = int(settings.credit.blocks(candidate.match) * candidate.instance.page_size)
    # The last token is always computed: its logits make the first output token.
    cached = min(saved, prompt_tokens - 1)
    rate = _measured_rate(candidate, settings) or usual
    if rate is None:
        return settings.timing.seconds(prompt_tokens - cached, cached)
    return (prompt_tokens - cached) / rate


def _standing(candidate: PrefillCandidate, settings: PrefillSettings) -> Standing:
    load = candidate.instance.load
    if load is None or not is_fresh(load, candidate.age_seconds, settings.stale_after_seconds):
        return Standing.UNKNOWN
    if load.parked_limit_tokens and (load.parked_tokens or 0) >= load.parked_limit_tokens:
        return Standing.FULL
    return Standing.GOOD


def _none_message(candidates: Sequence[PrefillCandidate], excluded: frozenset[str]) -> str:
    if not candidates:
        return "the service has no prefill instance"
    states = sorted({c.instance.state.value for c in candidates if c.instance.id not in excluded})
    told = f", the others are {', '.join(states)}" if states else ""
    failed = sum(c.instance.id in excluded for c in candidates)
    return f"no prefill instance can serve: {failed} of {len(candidates)} failed this request{told}"
