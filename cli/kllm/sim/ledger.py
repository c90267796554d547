"""GPU time, from allocation to release."""

from __future__ import annotations

from collections.abc import Iterable

from kllm.sim.laws.base import Pool


class Ledger:
    """Integrates what is held.

    Attributes:
        gpu_seconds: by pool.
        peak: most GPUs at a time.

    Args:
        pools: all there are.
        since: time before this moment does not count.
    """

    def __init__(self, pools: Iterable[Pool], *, since: float) -> None:
        self.gpu_seconds = dict.fromkeys(pools, 0.0)
        self.peak = 0
        self._held = dict.fromkeys(self.gpu_seconds, 0)
        self._at = self._since = since

    @property
    def held(self) -> int:
        """GPUs that are held."""
        return sum(self._held.values())

    def change(self, pool: Pool, gpus: int, now: float) -> None:
        """A pool takes GPUs, or with a negative number gives some back."""
        self.settle(now)
        self._held[pool] += gpus
        if now >= self._since:
            self.peak = max(self.peak, self.held)

    def settle(self, now: float) -> None:
        """Count until now."""
        if now > self._at:
            if self._at == self._since:
                self.peak = max(self.peak, self.held)
            for pool, gpus in self._held.items():
                self.gpu_seconds[pool] += gpus * (now - self._at)
            self._at = now
