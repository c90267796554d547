"""A picture of a run, with matplotlib where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kllm.bench.attainment import Goals
from kllm.bench.exceptions import OptionError
from kllm.bench.row import Row, Status


def check_plot(path: Path) -> None:
    """Make sure that a picture can be drawn later.

    Raises:
        OptionError: matplotlib is missing, or the file is no PNG.
    """
    if path.suffix.lower() != ".png":
        raise OptionError("--plot", f"{path} must end with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot", "it needs matplotlib, which is not installed; run: pip install 'kllm[plot]'")


def new_figure(inches: tuple[float, float]) -> Any:
    """An empty figure of matplotlib's that needs no screen."""
    backend: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=inches, layout="constrained")
    backend.FigureCanvasAgg(figure)
    return figure


def draw(rows: Sequence[Row], path: Path, *, title: str, goals: Goals) -> None:
    """TTFT and TPOT of each answer over time, and their distribution."""
    figure = new_figure((10, 6))
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    good = [row for row in rows if row.status is Status.OK]
    bad = [row.scheduled for row in rows if row.status is not Status.OK]
    for (over_time, distribution), name, limit in zip(
        axes, ("TTFT", "TPOT"), (goals.ttft_ms, goals.tpot_ms), strict=True
    ):
        points = [(row.scheduled, row.ttft if name == "TTFT" else row.tpot) for row in good]
        known = [(at, seconds * 1000) for at, seconds in points if seconds is not None]
        over_time.scatter([at for at, _ in known], [value for _, value in known], s=6)
        over_time.plot(bad, [0.0] * len(bad), "rx", markersize=4)
        over_time.set(xlabel="s", ylabel=f"{name} ms", ylim=(0, None))
        values = np.sort([value for _, value in known])
        distribution.plot(values, np.arange(1, values.size + 1) / max(values.size, 1))
        distribution.set(xlabel=f"{name} ms", ylabel="share", ylim=(0, 1))
        if limit is not None:
            over_time.axhline(limit, color="red", linewidth=0.8)
            distribution.axvline(limit, color="red", linewidth=0.8)
    figure.savefig(path, dpi=120)
