"""What one request may take, as the fleet tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Tokens; None is unknown.

    Attributes:
        context_tokens: prompt plus output.
        kv_tokens: room of the largest decode instance.
    """

    context_tokens: int | None = None
    kv_tokens: int | None = None
