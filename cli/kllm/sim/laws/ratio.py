"""Counts of two pools whose ratio shall stay within bounds. Pure."""

from __future__ import annotations

from fractions import Fraction

from kllm.sim.laws.base import Bounds


def within_ratio(
    prefill: int,
    decode: int,
    *,
    prefill_bounds: Bounds,
    decode_bounds: Bounds,
    least: Fraction,
    most: Fraction,
) -> tuple[int, int]:
    """Counts with `least` <= prefill / decode <= `most`, preferably by more of one pool, never by less.

    Source: kthena, docs/proposal/pd-disaggregated-autoscaling.md: too few prefill raises prefill; when its bound
    forbids that, decode falls; too many prefill raises decode likewise. Both at 0 stay; one alone at 0 becomes 1.

    Raises:
        ValueError: no counts within the bounds have such a ratio.
    """
    if not (least >= 0 and most > 0 and least <= most):
        raise ValueError(f"0 <= least <= most and most > 0 must hold, got {least} and {most}")
    prefill, decode = prefill_bounds.clamp(prefill), decode_bounds.clamp(decode)
    if prefill == 0 and decode == 0:
        return prefill, decode
    prefill, decode = max(prefill, min(1, prefill_bounds.most)), max(decode, min(1, decode_bounds.most))
    if decode and least <= Fraction(prefill, decode) <= most:
        return prefill, decode
    # Enough decode for the prefill there is; if no count of prefill suits that, more decode, and only then less.
    start = decode_bounds.clamp(max(decode, _ceil(prefill / most)))
    upwards = range(start, decode_bounds.most + 1)
    downwards = range(start - 1, max(1, decode_bounds.least) - 1, -1)
    for candidate in (*upwards, *downwards):
        lowest = max(prefill_bounds.least, _ceil(least * candidate))
        highest = min(prefill_bounds.most, int(most * candidate))
        if candidate >= 1 and lowest <= highest:
            return min(max(prefill, lowest), highest), candidate
    raise ValueError(f"no counts within the bounds have a ratio from {least} to {most}")


def _ceil(value: Fraction) -> int:
    return -((-value.numerator) // value.denominator)
