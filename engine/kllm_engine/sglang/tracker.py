"""Follows prefilled requests from the end of their prefill until their KV has left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kllm_engine.messages import Request

Outcome = Literal["Transferred", "ParkTimeout", "Aborted", "TransferFailed"]


@dataclass
class Prefilled:
    """A request whose KV is complete on this instance.

    Attributes:
        since: when its prefill ended.
        bound_at: when a decode instance had asked for it; None while it is parked.
        timed_out: it was given up because none did.
    """

    rid: str
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    since: float
    bound_at: float | None
    timed_out: bool = False


@dataclass
class Tracker:
    """Makes the events of requests; times are the caller's.

    Attributes:
        pid: process that sends the events.
        prefilled: requests whose KV is here, by id.
    """

    pid: int
    prefilled: dict[str, Prefilled] = field(default_factory=dict)

    @property
    def parked(self) -> list[Prefilled]:
        """Requests that wait for a decode instance."""
        return [request for request in self.prefilled.values() if request.bound_at is None]

    def done(self, request: Prefilled) -> Request:
        """Prefill ended."""
        self.prefilled[request.rid] = request
        return Request(
            pid=self.pid,
            now=request.since,
            kind="prefill_done",
            rid=request.rid,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            queue_seconds=request.queue_seconds,
            prefill_seconds=request.prefill_seconds,
            bound=request.bound_at is not None,
        )

    def bound(self, rid: str, now: float) -> None:
        """A decode instance has asked for the KV."""
        request = self.prefilled.get(rid)
        if request is not None and request.bound_at is None:
            request.bound_at = now

    def released(self, rid: str, *, now: float, outcome: Outcome, message: str = "") -> Request | None:
        """The KV has left; None for a request that is not known here."""
        request = self.prefilled.pop(rid, None)
        if request is None:
            return None
        reason: Outcome = "ParkTimeout" if request.timed_out else outcome
        parked = (request.bound_at if request.bound_at is not None else now) - request.since
        return Request(
            pid=self.pid,
            now=now,
            kind="failed" if reason == "TransferFailed" else "released",
            rid=rid,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            queue_seconds=request.queue_seconds,
            prefill_seconds=request.prefill_seconds,
            parked_seconds=max(0.0, parked),
            reason=reason,
            message=message,
        )
