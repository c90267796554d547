"""Memory and file descriptors of processes over time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

WARM_SHARE = 0.2
"""Of the run's beginning that no slope is taken of: pools and caches fill."""


@dataclass(frozen=True)
class Sample:
    """What a process held at a moment.

    Attributes:
        at: seconds since the run began.
        rss_bytes: resident set.
        descriptors: open files.
    """

    at: float
    rss_bytes: int
    descriptors: int


@dataclass
class Watch:
    """Samples of some processes, by name."""

    began: float = field(default_factory=time.monotonic)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def sample(self, pids: dict[str, int]) -> None:
        """Look at each process once; one that is gone is left out."""
        at = time.monotonic() - self.began
        for name, pid in pids.items():
            process = Path("/proc") / str(pid)
            try:
                status = (process / "status").read_text().splitlines()
                descriptors = len(list((process / "fd").iterdir()))
            except OSError:
                continue
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
            self.samples.setdefault(name, []).append(Sample(at, kilobytes * 1024, descriptors))

    def summary(self) -> dict[str, dict[str, float]]:
        """Per process: resident memory at the beginning, at the end and its slope; descriptors likewise."""
        return {name: _summary(samples) for name, samples in self.samples.items()}


def _summary(samples: list[Sample]) -> dict[str, float]:
    end = samples[-1].at
    settled = [sample for sample in samples if sample.at >= end * WARM_SHARE]
    minutes = np.array([sample.at for sample in settled]) / 60
    return {
        "rss_mib_first": round(settled[0].rss_bytes / 2**20, 2),
        "rss_mib_last": round(samples[-1].rss_bytes / 2**20, 2),
        "rss_kib_per_minute": round(_slope(minutes, [sample.rss_bytes / 1024 for sample in settled]), 2),
        "descriptors_first": settled[0].descriptors,
        "descriptors_last": samples[-1].descriptors,
        "descriptors_per_minute": round(_slope(minutes, [sample.descriptors for sample in settled]), 3),
    }


def _slope(times: np.ndarray, values: list[float]) -> float:
    """Of the straight line that fits best; 0 without two points."""
    return float(np.polyfit(times, np.array(values), 1)[0]) if len(values) > 1 else 0.0
