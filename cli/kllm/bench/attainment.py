"""Which requests met their objectives. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kllm.bench.row import Row, Status


@dataclass(frozen=True)
class Goals:
    """Objectives of one request, in milliseconds; None is met by every answer."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there is anything to meet."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def meets(self, row: Row) -> bool:
        """Whether a request was answered and met both. An answer of one token has no TPOT to miss."""
        if row.status is not Status.OK or row.ttft is None:
            return False
        ttft_limit = math.inf if self.ttft_ms is None else self.ttft_ms
        tpot_limit = math.inf if self.tpot_ms is None else self.tpot_ms
        return row.ttft * 1000 <= ttft_limit and (row.tpot or 0.0) * 1000 <= tpot_limit

    def __str__(self) -> str:
        parts = [("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)]
        return " and ".join(f"{name} <= {limit:g} ms" for name, limit in parts if limit is not None)


def attainment(rows: Sequence[Row], goals: Goals) -> float | None:
    """Share of all requests that met both objectives; None without requests or objectives."""
    if not rows or not goals.are_set:
        return None
    return sum(map(goals.meets, rows)) / len(rows)
