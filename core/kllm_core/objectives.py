"""Roles, service-level objectives, and load on one scale for both roles. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Role(enum.StrEnum):
    """What an instance does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role on the other side of a pairing."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class Binding(enum.StrEnum):
    """When the decode instance of a request is chosen. Values are those of manifests."""

    LATE = "Late"
    """After prefill: least queueing on decode, and the KV waits on prefill meanwhile."""
    EARLY = "Early"
    """On arrival, together with the prefill instance."""
    JUST_IN_TIME = "JustInTime"
    """When the rest of the prefill takes as long as the handshake."""


class LoadSource(enum.StrEnum):
    """Which of the two numbers made the load."""

    PREDICTED = "Predicted"
    MEASURED = "Measured"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Objectives:
    """Service-level objectives of one InferenceService.

    Attributes:
        ttft_seconds: time to first token, at the client's edge.
        tpot_seconds: time per output token after the first.
        percentile: share of requests, in percent, that must meet each objective.
    """

    ttft_seconds: float
    tpot_seconds: float
    percentile: int = 90

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
        if not 1 <= self.percentile <= 99:
            raise ValueError(f"percentile must be 1 to 99, got {self.percentile!r}")


@dataclass(frozen=True)
class Load:
    """Load of one role: 1.0 is the boundary of its objective.

    Attributes:
        value: max of predicted and measured; None when neither is known.
        predicted: from the timing model, over the objective.
        measured: sliding percentile at the edge, over the objective.
        source: which of the two `value` is.
    """

    value: float | None
    predicted: float | None
    measured: float | None
    source: LoadSource

    @classmethod
    def of(cls, *, predicted: float | None, measured: float | None) -> Load:
        """Combine both; a number that is None, NaN, infinite or negative counts as unknown."""
        known_predicted = _known(predicted)
        known_measured = _known(measured)
        if known_predicted is None and known_measured is None:
            return cls(None, None, None, LoadSource.UNKNOWN)
        if known_measured is None or (known_predicted is not None and known_predicted >= known_measured):
            return cls(known_predicted, known_predicted, known_measured, LoadSource.PREDICTED)
        return cls(known_measured, known_predicted, known_measured, LoadSource.MEASURED)


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value >= 0 else None
