"""A picture of a simulation over time, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kllm.bench.plot import new_figure
from kllm.sim.outcome import Outcome, Point

_COLOURS = {"one": "tab:blue", "prefill": "tab:orange", "decode": "tab:blue"}


def draw(outcome: Outcome, path: Path, *, title: str) -> None:
    """Rate, counts, queue and load over time. `kllm.bench.plot.check_plot` says beforehand whether that is possible.

    Raises:
        OSError: the file cannot be written.
    """
    figure = new_figure((11, 10))
    attained = f"{outcome.attainment.both:.1%} attained, {outcome.gpu_seconds / 3600:.2f} GPU h"
    figure.suptitle(f"{title}, {outcome.policy}: {attained}")
    rate, met, counts, queue = figure.subplots(4, 1, sharex=True)
    points, pools = outcome.series, list(outcome.mean_replicas)
    at = [point.at for point in points]
    rate.step(at, [point.rate for point in points], where="pre")
    rate.set(ylabel="requests/s", ylim=(0, None))
    _draw_attainment(met, points)
    for pool in pools:
        serving = [point.serving.get(pool, 0) for point in points]
        counts.step(at, serving, where="post", color=_COLOURS[pool], label=f"{pool} serving")
        desired = [point.desired.get(pool, 0) for point in points]
        counts.step(at, desired, where="post", color=_COLOURS[pool], linestyle=":", label=f"{pool} desired")
        queued = [point.queued.get(pool, 0) for point in points]
        queue.plot(at, queued, color=_COLOURS[pool], label=f"{pool} queued")
    if any(point.parked for point in points):
        queue.plot(at, [point.parked for point in points], color="tab:green", label="parked on prefill")
    counts.set(ylabel="instances", ylim=(0, None))
    queue.set(ylabel="requests", xlabel="s", ylim=(0, None))
    for axes in (counts, queue):
        axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def _draw_attainment(axes: Any, points: Sequence[Point]) -> None:
    told = [(point.at, point.attained) for point in points if point.attained is not None]
    axes.step([at for at, _ in told], [share for _, share in told], where="pre")
    axes.set(ylabel="attained", ylim=(0, 1.05))
