"""What the client saw of one request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    REJECTED = "rejected"
    """Not sent, because too many were in flight."""
    UNFINISHED = "unfinished"
    """Still waiting when the benchmark ended."""


@dataclass(slots=True)
class Row:
    """One request. Times are seconds from the beginning of the load; None has not happened.

    Attributes:
        scheduled: when it should have been sent.
        sent: when it was.
        first: when its first token came.
        last: when its last token came.
        ended: when the answer was complete, or failed.
        error: kind of the failure, `http_503` for instance.
        message: what the server or the connection said.
        keeps_times: write down when each piece of the answer came, too.
        times: when each did, if so.
        stages: seconds that its stages took, as kLLM's router tells them where it is asked to.
    """

    index: int
    scheduled: float
    input_tokens: int
    output_tokens: int
    status: Status = Status.UNFINISHED
    sent: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    message: str | None = None
    keeps_times: bool = False
    times: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return None if self.sent is None or self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two."""
        if self.first is None or self.last is None or (self.completion_tokens or 0) < 2:
            return None
        return (self.last - self.first) / ((self.completion_tokens or 0) - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from sending to the end of the answer."""
        return None if self.sent is None or self.ended is None else self.ended - self.sent

    @property
    def lag(self) -> float | None:
        """Seconds that the client itself was late."""
        return None if self.sent is None else self.sent - self.scheduled

    def hear(self, at: float) -> None:
        """A piece of the answer came."""
        self.last = at
        self.first = at if self.first is None else self.first
        if self.keeps_times:
            self.times.append(at)

    def fail(self, kind: str, message: str) -> None:
        """It failed."""
        self.status = Status.FAILED
        self.error = kind
        self.message = message[:300]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "index": self.index,
            "status": str(self.status),
            "error": self.error,
            "message": self.message,
            "scheduled_seconds": _rounded(self.scheduled),
            "sent_seconds": _rounded(self.sent),
            "ttft_seconds": _rounded(self.ttft),
            "tpot_seconds": _rounded(self.tpot),
            "e2e_seconds": _rounded(self.e2e),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
