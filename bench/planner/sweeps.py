"""Knobs that each law is tried with: its defaults, and what its own documents say to turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Knobs = dict[str, Any]


def _grid(**values: Sequence[Any]) -> list[Knobs]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _metrics(**others: Sequence[Any]) -> list[Knobs]:
    """For laws that compare a metric with a target: what the two pools may be scaled by."""
    return [
        *_grid(prefill_metric=("utilisation",), prefill_target=(0.5, 0.65, 0.8), target=(48.0, 96.0), **others),
        *_grid(prefill_metric=("concurrency",), prefill_target=(2.0,), target=(48.0,), **others),
        *_grid(prefill_metric=("queue",), prefill_target=(1.0,), target=(48.0,), **others),
    ]


_SLO = [
    {},
    {"spare": 0.3, "forecast_quantile": 0.9},
    {"spare": 0.05, "keep_quantile": 0.9},
    {"spare": 0.0, "keep_quantile": 0.8, "forecast_quantile": 0.7, "scale_down_below": 0.9},
    {"spare": 0.0, "keep_quantile": 0.6, "forecast_quantile": 0.6, "scale_down_below": 0.95},
    {
        "spare": 0.0, "keep_quantile": 0.6, "forecast_quantile": 0.6, "scale_down_below": 0.95, "scale_up_above": 1.5,
        "growth_starts": 0.3,
    },
]  # fmt: skip
"""How much is kept for what may come, from the defaults up and down."""

ONE_POOL: Mapping[str, list[Knobs]] = {
    "slo": _SLO,
    "llm-d": [
        *_grid(up_above=(0.45, 0.55, 0.75), down_below=(0.4,)),
        *_grid(up_above=(0.55, 0.75), down_below=(0.3,), smoothing=(15.0,), up_stabilisation=(0.0,)),
        *_grid(up_above=(0.45, 0.55, 0.75), down_below=(0.4,), down_period=(30.0,), down_stabilisation=(60.0,)),
    ],
    "llm-d-token-aware": _grid(
        backlog=(0.1, 0.5), kv_use=(0.5, 0.65, 0.8), up_pods=(4,), up_period=(15.0, 180.0), down_stabilisation=(60.0,)
    ),
    "llm-d-wva": _grid(up_above=(0.6, 0.75, 0.9), down_below=(0.5,), down_stabilisation=(60.0, 300.0)),
    "hpa": _grid(target=(32.0, 40.0, 48.0, 60.0), down_stabilisation=(60.0, 300.0)),
    "aibrix": _grid(target=(0.5, 0.65, 0.8), strategy=("apa", "kpa"), down_cooldown=(60.0,)),
    "kthena": _grid(target=(32.0, 40.0, 48.0, 60.0), down_stabilisation=(60.0,)),
    "dynamo": [
        *_grid(predictor=("kalman", "constant"), load=(False,), throughput_interval=(180.0, 60.0, 20.0)),
        *_grid(predictor=("kalman",), load=(True,), throughput_interval=(60.0,)),
        *_grid(throughput=(False,), load=(True,), tpot_share=(1.0, 0.5)),
    ],
    "clairvoyant": _grid(kv_share=(0.7, 0.8, 0.9)),
}
"""By policy, for whole requests on one pool."""

TWO_POOLS: Mapping[str, list[Knobs]] = {
    "slo": [
        *_SLO,
        {"stabilisation_starts": 3.0},
        {"stabilisation_starts": 3.0, "spare": 0.3, "forecast_quantile": 0.9},
    ],
    "hpa": _metrics(),
    "llm-d-token-aware": _grid(backlog=(0.5, 1.5), kv_use=(0.25, 0.5, 0.8), up_pods=(4,), up_period=(15.0,)),
    "dynamo": [
        *_grid(predictor=("kalman", "constant"), load=(False,), throughput_interval=(60.0,)),
        *_grid(predictor=("kalman",), load=(True,), throughput_interval=(180.0, 60.0), ttft_share=(1.0, 0.25)),
        *_grid(throughput=(False,), load=(True,), ttft_share=(1.0, 0.25), tpot_share=(0.7,)),
    ],
    "kthena": _metrics(least_ratio=(0.25,)),
    "clairvoyant": _grid(utilisation=(0.7, 0.9), window=(10.0, 30.0)),
}
"""By policy, for a prefill and a decode pool."""


def of(sweep: Mapping[str, list[Knobs]], *, quick: bool) -> Iterable[tuple[str, Knobs]]:
    """Policies with their knobs; the first of each only if it shall be quick."""
    for policy, tried in sweep.items():
        for knobs in tried[:1] if quick else tried:
            yield policy, knobs
