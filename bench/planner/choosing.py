"""Which of several tried settings is taken, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import cases

GOAL = 0.99

Tried = tuple[cases.Spec, Sequence[dict[str, Any]]]
"""A description, and the figures of its runs."""


def attained(figures: Sequence[dict[str, Any]]) -> float:
    """Share of requests that met both objectives, mean over runs."""
    return fmean(each["attainment"]["both"] for each in figures)


def cost(figures: Sequence[dict[str, Any]]) -> float:
    """GPU seconds, or instances during the load where that is told; mean over runs."""
    return fmean(each.get("mean_during_load", each["gpu_seconds"]) for each in figures)


def cheapest(tried: Sequence[Tried]) -> cases.Spec:
    """The cheapest that attains the goal; without one, that which attains most."""
    good = [each for each in tried if attained(each[1]) >= GOAL]
    if good:
        return min(good, key=lambda each: cost(each[1]))[0]
    return max(tried, key=lambda each: attained(each[1]))[0]


def best_within(tried: Sequence[Tried], budget: float) -> cases.Spec:
    """That which attains most for at most so much; without one, the cheapest."""
    within = [each for each in tried if cost(each[1]) <= budget]
    if within:
        return max(within, key=lambda each: attained(each[1]))[0]
    return min(tried, key=lambda each: cost(each[1]))[0]
