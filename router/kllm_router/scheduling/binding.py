"""When a decode instance is asked for a prompt that is still being computed. Pure."""

from __future__ import annotations

_LEAST_LEAD_SECONDS = 0.002


def bind_after(predicted_seconds: float, *, handshake_seconds: float) -> float:
    """Seconds from sending a prompt until a decode instance is asked, just in time.

    Asked then, its answer is there when the KV is complete: it waits for no handshake, and room on the decode instance
    is held for no longer than that. A prompt that is done before is bound at once.

    Args:
        predicted_seconds: from sending the prompt until its KV is complete.
        handshake_seconds: from asking a decode instance until KV could flow.
    """
    return max(0.0, predicted_seconds - max(handshake_seconds, _LEAST_LEAD_SECONDS))
