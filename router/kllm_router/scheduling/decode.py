"""Choice of the decode instance: the least predicted time per token after joining, plus the transfer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kllm_core.fleet import EngineLoad, Instance
from kllm_core.timing import PRIOR, DecodeTiming
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

_NO_TRANSFERS: Mapping[str, float] = {}
_MOST_OUTPUT = 4096
"""Output tokens that an engine makes room for on admission, whatever the client's limit."""


@dataclass(frozen=True)
class DecodeSettings:
    """How decode instances are judged.

    Attributes:
        timing: what a step costs; scaled to an instance's measured steps where there are any.
        stale_after_seconds: an older load is unknown.
        horizon_tokens: output tokens over which a slower step is weighed against a dearer transfer.
        reserve_tokens: output that head-room must allow for when the client set no limit.
        tie_seconds: predictions this close are equal.
    """

    timing: DecodeTiming = PRIOR.decode
    stale_after_seconds: float = 3.0
    horizon_tokens: int = 128
    reserve_tokens: int = 512
    tie_seconds: float = 0.001


@dataclass(frozen=True)
class DecodeCandidate:
    """One decode instance as the router sees it.

    Attributes:
        age_seconds: of its load; None when it never told any.
        unreported_requests: of routers, which its load cannot contain yet.
        unreported_tokens: KV of those.
        in_flight: requests of these routers that it has.
    """

    instance: Instance
    age_seconds: float | None = None
    unreported_requests: int = 0
    unreported_tokens: int = 0
    in_flight: int = 0


def choose_decode(
    candidates: Sequence[DecodeCandidate],
    *,
    prompt_tokens: int,
    max_new_tokens: int | None = None,
    transfer_seconds: Mapping[str, float] = _NO_TRANSFERS,
    settings: DecodeSettings = DecodeSettings(),
    rotation: int = 0,
    excluded: frozenset[str] = frozenset(),
) -> Choice | Refusal:
    """Pick the instance on which the request's tokens are expected soonest.

    Cost = transfer + horizon times the predicted TPOT after joining, with the wait for a place in the batch in it.
    An instance above its high water, or that this request would lift above it, is taken only when all are.

    Args:
        candidates: decode instances in a stable order, in whatever state.
        prompt_tokens: at least 1.
        max_new_tokens: the client's limit.
        transfer_seconds: measured for this request's prefill instance, by decode instance; a missing one costs nothing.
        settings: how they are judged.
        rotation: a counter of the caller that makes equals take turns.
        excluded: ids that failed this request.
    """
    usable = [c for c in candidates if c.instance.takes_requests and c.instance.id not in excluded]
    if not usable:
        return Refusal(Refused.NONE_SERVING, none_serving_message("decode", [c.instance for c in candidates], excluded))
    wanted = prompt_tokens + (settings.reserve_tokens if max_new_tokens is None else min(max_new_tokens, _MOST_OUTPUT))
    able = [c for c in usable if _can_ever_hold(c.instance.load, prompt_tokens, max_new_tokens)]
    if not able:
        largest = max((c.instance.load.kv_total_tokens or 0) for c in usable if c.instance.load is not None)
        return Refusal(
            Refused.TOO_LARGE,
            f"the request needs KV for up to {wanted} tokens, and the largest decode instance has room for {largest}",
        )
    usual = median(scale for c in able if (scale := _scale(c, settings)) is not None) or 1.0
    costs = [
        Cost(
            c.instance.id,
            _standing(c, wanted, settings),
            transfer_seconds.get(c.instance.id, 0.0) + _decode_seconds(c, prompt_tokens, settings, usual),
            c.in_flight,
        )
        for c in able
    ]
    return pick(costs, tie_seconds=settings.tie_seconds, rotation=rotation)


def _can_ever_hold(load: EngineLoad | None, prompt_tokens: int, max_new_tokens: int | None) -> bool:
    """An engine lets a request that can never fit wait for ever, without an error."""
    if load is None or load.kv_total_tokens is None:
        return True
    return prompt_tokens + (max_new_tokens or 1) <= load.kv_total_tokens


def _believed(candidate: DecodeCandidate, settings: DecodeSettings) -> EngineLoad | None:
    fresh = is_fresh(candidate.instance.load, candidate.age_seconds, settings.stale_after_seconds)
    return candidate.instance.load if fresh else None


def _scale(candidate: DecodeCandidate, settings: DecodeSettings) -> float | None:
    """Measured step over predicted step, where the instance is decoding."""
    load = _believed(candidate, settings)
    if load is None or not load.running_requests:
        return None
    measured = positive(load.decode_step_seconds)
    predicted = settings.timing.seconds(load.running_requests, load.kv_used_tokens or 0)
    return measured / predicted if measured is not None and predicted > 0 else None


def _decode_seconds(candidate: DecodeCandidate, prompt_tokens: int, settings: DecodeSettings, usual: float) -> float:
    load = _believed(candidate, settings)
    batch, kv = 1 + candidate.unreported_requests, prompt_tokens + candidate.unreported_tokens
    crowding = 1.0
    if load is not None:
        batch += (load.running_requests or 0) + (load.queued_requests or 0)
        kv += load.kv_used_tokens or 0
        if load.max_running_requests and batch > load.max_running_requests:
            # Those that find no place wait for others to end: time per token grows with the number of rounds.
            crowding = batch / load.max_running_requests
            batch = load.max_running_requests
    scale = _scale(candidate, settings) or usual
    return settings.horizon_tokens * crowding * scale * settings.timing.tpot_seconds(batch, kv)


def _standing(candidate: DecodeCandidate, wanted: int, settings: DecodeSettings) -> Standing:
    load = _believed(candidate, settings)
    if load is None or load.kv_used_tokens is None:
        return Standing.UNKNOWN
    high_water = load.kv_high_water_tokens or load.kv_total_tokens
    if high_water is not None and load.kv_used_tokens + candidate.unreported_tokens + wanted > high_water:
        return Standing.OVER_HIGH_WATER
    return Standing.GOOD
