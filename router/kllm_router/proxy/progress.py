"""How far one request has come, and when."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kllm_router.interfaces import EventKind, StageTimes, WatchedEvent


class Stage(enum.StrEnum):
    """Stages of a request, in order."""

    QUEUE = "queue"
    """Not yet at a prefill instance."""
    PREFILL = "prefill"
    """At a prefill instance: queued there or being computed."""
    PARKED = "parked"
    """Its KV waits for a decode instance."""
    HANDSHAKE = "handshake"
    """The decode instance was asked."""
    TRANSFER = "transfer"
    """Its KV has left the prefill instance."""
    STREAMING = "streaming"
    """The first byte of the answer is there."""


@dataclass
class Progress:
    """Moments on the monotonic clock; None has not happened.

    Attributes:
        prefill_seconds: as the prefill instance told it; unlike the moments it holds no network time.
    """

    arrived: float
    stage: Stage = Stage.QUEUE
    parked_at: float | None = None
    bound_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_seconds: float | None = None
    cached_tokens: int | None = None

    def enter(self, stage: Stage) -> None:
        """Reach a stage."""
        self.stage = stage

    def park(self) -> None:
        """The prompt's KV is complete."""
        if self.parked_at is None:
            self.parked_at = time.monotonic()
            if self.stage is Stage.PREFILL:
                self.stage = Stage.PARKED

    def again(self) -> Progress:
        """That of the same request's next attempt: what the failed one took counts as queue."""
        return Progress(self.arrived)

    def hear(self, event: WatchedEvent) -> None:
        """Learn from an event of the prefill instance."""
        if event.kind is EventKind.RELEASED and self.stage is Stage.HANDSHAKE:
            self.stage = Stage.TRANSFER
        if event.kind not in {EventKind.PREFILL_DONE, EventKind.REQUEUED}:
            return
        self.park()
        if event.prefill_seconds > 0:
            self.prefill_seconds = event.prefill_seconds
        if event.prompt_tokens > 0:
            self.cached_tokens = event.cached_tokens

    def first(self, at: float | None) -> None:
        """The first byte of a stream has come."""
        self.first_at = at

    def times(self, completion_tokens: int | None) -> StageTimes:
        """Durations of the stages."""
        queue = prefill = bind = transfer = per_token = None
        if self.parked_at is not None:
            until_parked = self.parked_at - self.arrived
            if self.prefill_seconds is not None:
                prefill = min(self.prefill_seconds, until_parked)
                queue = until_parked - prefill
            if self.bound_at is not None:
                bind = max(0.0, self.bound_at - self.parked_at)
                if self.first_at is not None:
                    transfer = max(0.0, self.first_at - max(self.bound_at, self.parked_at))
        if self.first_at is not None and self.last_at and completion_tokens is not None and completion_tokens > 1:
            per_token = max(0.0, self.last_at - self.first_at) / (completion_tokens - 1)
        return StageTimes(
            queue=queue,
            prefill=prefill,
            bind=bind,
            transfer=transfer,
            first_token=None if self.first_at is None else self.first_at - self.arrived,
            per_output_token=per_token,
        )

    def known(self) -> Iterator[tuple[str, float]]:
        """Names and seconds of the stages that are over."""
        times = self.times(None)
        for name in ("queue", "prefill", "bind", "transfer", "first_token"):
            seconds: float | None = getattr(times, name)
            if seconds is not None:
                yield name.replace("_", "-"), seconds
