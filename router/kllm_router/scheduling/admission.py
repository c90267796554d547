"""Whether a new request is let in at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kllm_router.scheduling.choices import Refusal, Refused, is_fresh
from kllm_router.scheduling.decode import DecodeCandidate
from kllm_router.scheduling.prefill import PrefillCandidate
from kllm_router.scheduling.slack import SlackSettings

_NO_SLACK = SlackSettings()


@dataclass(frozen=True)
class AdmissionSettings:
    """Bounds on what is in the house.

    Attributes:
        max_in_flight: requests of this router.
        max_waiting_per_decode: requests that wait on one decode instance; a new one is refused when all have more,
            because what is prefilled then would only hold KV.
        stale_after_seconds: an older load counts as no load.
        retry_after_seconds: told to clients that are refused.
        slack: when a request that would be late is refused.
    """

    max_in_flight: int = 4096
    max_waiting_per_decode: int = 256
    stale_after_seconds: float = 3.0
    retry_after_seconds: float = 1.0
    slack: SlackSettings = _NO_SLACK


def admit(
    prefill: Sequence[PrefillCandidate],
    decode: Sequence[DecodeCandidate],
    *,
    in_flight: int,
    settings: AdmissionSettings = AdmissionSettings(),
) -> Refusal | None:
    """Say why a new request is refused, or None when it may come in."""
    for role, candidates in (("prefill", prefill), ("decode", decode)):
        if not any(c.instance.takes_requests for c in candidates):
            return Refusal(Refused.NONE_SERVING, f"no {role} instance is serving", settings.retry_after_seconds)
    if in_flight >= settings.max_in_flight:
        return Refusal(
            Refused.OVERLOADED,
            f"{in_flight} requests are in flight, the limit is {settings.max_in_flight}",
            settings.retry_after_seconds,
        )
    if all(_waiting(c, settings) > settings.max_waiting_per_decode for c in decode if c.instance.takes_requests):
        return Refusal(
            Refused.OVERLOADED,
            f"more than {settings.max_waiting_per_decode} requests wait on every decode instance",
            settings.retry_after_seconds,
        )
    return None


def _waiting(candidate: DecodeCandidate, settings: AdmissionSettings) -> int:
    load = candidate.instance.load
    if load is None or not is_fresh(load, candidate.age_seconds, settings.stale_after_seconds):
        return candidate.unreported_requests
    return (load.queued_requests or 0) + candidate.unreported_requests
