"""When a router tells the others, and what: anew when something has changed, and now and then to be heard. Pure."""

from __future__ import annotations

from dataclasses import replace

from kllm_router.shared.told import Told, encode


class Outbox:
    """What was told last.

    Args:
        heartbeat_seconds: after which the same is told again.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat = heartbeat_seconds
        self._sequence = 0
        self._told: Told | None = None
        self._told_at = 0.0

    def due(self, own: Told, now: float) -> bytes | None:
        """What is to be told now, whatever the sequence in it; None: nothing."""
        if own == self._told and now - self._told_at < self._heartbeat:
            return None
        self._sequence += 1
        self._told, self._told_at = own, now
        return encode(replace(own, sequence=self._sequence))

    def forget(self) -> None:
        """It is not known to have arrived: the next time something is told."""
        self._told = None
