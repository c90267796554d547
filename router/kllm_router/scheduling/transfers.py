"""What it takes to move KV from one instance to another, learned from requests that were handed over. Pure."""

from __future__ import annotations

import math

_GAIN = 0.05
_LINK_GAIN = 0.2
_LEAST_RATIO, _MOST_RATIO = 0.2, 20.0
_MAX_LINKS = 65_536
_TYPICAL_TOKENS = 2048


class TransferTimes:
    """Seconds = ratio of the link x (base + tokens x per token), where base and per token are those of all links.

    What is measured, from asking the decode instance until the KV has left, holds waiting for room there too. A time
    above the prediction therefore counts for a quarter.

    Args:
        base_seconds: assumed before anything was measured.
        seconds_per_token: the same.
    """

    def __init__(self, *, base_seconds: float = 0.01, seconds_per_token: float = 5e-6) -> None:
        self._base, self._per_token = base_seconds, seconds_per_token
        self._ratios: dict[tuple[str, str], float] = {}

    @property
    def handshake_seconds(self) -> float:
        """Of a transfer without any KV."""
        return self._base

    def estimate(self, prefill: str, decode: str, tokens: int) -> float:
        """Seconds of a transfer; a link that was never used is like the others."""
        return self._ratios.get((prefill, decode), 1.0) * self.usual(tokens)

    def usual(self, tokens: int) -> float:
        """Seconds of a transfer on any link."""
        return self._base + tokens * self._per_token

    def observe(self, prefill: str, decode: str, tokens: int, seconds: float) -> None:
        """Learn from one transfer; numbers that make no sense are left out."""
        if not (tokens >= 0 and math.isfinite(seconds) and seconds > 0):
            return
        link = (prefill, decode)
        usual = self.usual(tokens)
        ratio = self._ratios.get(link, 1.0)
        error = seconds - ratio * usual
        weight = 0.25 if error > 0 else 1.0
        # Normalised least mean squares: long transfers tell of the bandwidth, short ones of the handshake.
        scaled = tokens / _TYPICAL_TOKENS
        step = _GAIN * weight * (seconds / ratio - usual) / (1.0 + scaled * scaled)
        self._base = max(0.0, self._base + step)
        self._per_token = max(0.0, self._per_token + step * scaled / _TYPICAL_TOKENS)
        if usual > 0:
            moved = ratio + _LINK_GAIN * weight * (seconds / usual - ratio)
            if link in self._ratios or len(self._ratios) < _MAX_LINKS:
                self._ratios[link] = min(_MOST_RATIO, max(_LEAST_RATIO, moved))

    def forget(self, instance_id: str) -> None:
        """The instance has left: its links are gone."""
        for link in [link for link in self._ratios if instance_id in link]:
            del self._ratios[link]
