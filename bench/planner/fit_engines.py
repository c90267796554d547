"""Fits the known engines of `kllm.sim.engines` to the grids that their numbers come from, and says how well they fit.

    python bench/planner/fit_engines.py shared/traces/engine_grids/*.csv

A grid has one row per step: prefill by input length at batch 1, decode by context and batch, in milliseconds.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from kllm.calibration.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill, prefill_seconds

_CHUNK_TOKENS = 8192


def fit(path: Path) -> str:
    """One line per role."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    prefill = [
        PrefillPoint(int(row["isl_or_ctx"]), float(row["ms"]) / 1000) for row in rows if row["mode"] == "prefill"
    ]
    decode = [
        DecodePoint(int(row["batch"]), int(row["batch"]) * int(row["isl_or_ctx"]), float(row["ms"]) / 1000)
        for row in rows
        if row["mode"] == "decode"
    ]
    p, d = fit_prefill(prefill, chunk_tokens=_CHUNK_TOKENS), fit_decode(decode)
    p_errors = [prefill_seconds(p, each.tokens, chunk_tokens=_CHUNK_TOKENS) / each.seconds - 1 for each in prefill]
    d_errors = [d.seconds(each.batch, each.kv_tokens) / each.seconds - 1 for each in decode]
    return (
        f"{path.stem}\n"
        f"  prefill a={p.a:.3e} b={p.b:.3e} k={p.k:.3e}  {_errors(p_errors)} of {len(prefill)}\n"
        f"  decode  a={d.a:.3e} b={d.b:.3e} c={d.c:.3e}  {_errors(d_errors)} of {len(decode)}"
    )


def _errors(errors: list[float]) -> str:
    absolute = np.abs(errors)
    return f"error at most {absolute.max():.1%}, mean {absolute.mean():.1%}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(fit(Path(name)))
