"""What steps took at different sizes, and the coefficients that follow from it. Pure.

What engines tell is remembered by size, so that a load that hardly changes does not make one forget how long steps of
other sizes take. The coefficients are those of a ridge regression towards one common factor: what the sizes seen so
far cannot tell apart stays as the prior has it, only slower or faster as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

_WEIGHT = 0.1
"""Part of a new report in what is known of its size: with one each second and instance, about the last ten count."""
_FADES = 0.9995
"""Part of a size's weight that is left after each round of reports: with one in five seconds, half after two hours.
Engines change with their revision, and what the former one took must not last for ever."""
_NEWS = 2.0
"""Factor by which one report may differ from what is known of its size: a hiccup is no news."""
_SETTLED = 3
"""Reports of a size after which that holds."""
_MOST_SPOTS = 64
_TRUST = 0.05
"""Relative error of what is remembered of a size, over that of a coefficient of the prior: with two sizes that are far
apart the reports decide, with one the prior does."""
_FREEDOM = 20.0
"""Factor by which a coefficient may differ from the common factor, either way."""

Key = tuple[int, ...]


@dataclass(frozen=True)
class Spot:
    """Steps of about one size.

    Attributes:
        reports: in it.
        weight: from nothing to 1, the more and the newer they are.
        parts: seconds that the prior's coefficients give, one by one, as a mean.
        seconds: that they took, as a mean of logarithms.
    """

    reports: int
    weight: float
    parts: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Spots:
    """Steps of all sizes seen so far, of one role."""

    by_size: Mapping[Key, Spot] = field(default_factory=dict)

    def faded(self) -> Spots:
        """A round of reports later."""
        return Spots({key: replace(spot, weight=spot.weight * _FADES) for key, spot in self.by_size.items()})

    def seen(self, key: Key, parts: Sequence[float], seconds: float) -> Spots:
        """With one more report.

        Args:
            key: its size, coarsely.
            parts: seconds that the prior's coefficients give for it, one by one.
            seconds: that it took.
        """
        before = self.by_size.get(key)
        if before is None:
            spot = Spot(1, _WEIGHT, tuple(parts), seconds)
        else:
            if before.reports >= _SETTLED:
                seconds = min(max(seconds, before.seconds / _NEWS), before.seconds * _NEWS)
            spot = Spot(
                before.reports + 1,
                before.weight + _WEIGHT * (1 - before.weight),
                tuple(old + _WEIGHT * (new - old) for old, new in zip(before.parts, parts, strict=True)),
                math.exp((1 - _WEIGHT) * math.log(before.seconds) + _WEIGHT * math.log(seconds)),
            )
        spots = {**self.by_size, key: spot}
        if len(spots) > _MOST_SPOTS:
            del spots[min(spots, key=lambda each: spots[each].weight)]
        return Spots(spots)

    def factors(self, common: float) -> tuple[float, ...]:
        """By what each of the prior's coefficients is to be multiplied.

        Args:
            common: the factor of all of them, where nothing tells them apart.
        """
        spots = list(self.by_size.values())
        if not spots:
            return ()
        # Each row is relative to what it took, and each unknown to the common factor, so that both are near 1.
        rows = np.array([[common * part / spot.seconds for part in spot.parts] for spot in spots])
        weights = np.array([spot.weight for spot in spots])
        free = [index for index in range(rows.shape[1]) if rows[:, index].any()]
        found = np.ones(rows.shape[1])
        while free:
            rest = 1 - rows @ found + rows[:, free] @ found[free]
            chosen = rows[:, free]
            left = chosen.T @ (weights[:, None] * chosen) + _TRUST**2 * np.eye(len(free))
            right = chosen.T @ (weights * rest) + _TRUST**2
            found[free] = np.linalg.solve(left, right)
            beyond = [index for index in free if not 1 / _FREEDOM <= found[index] <= _FREEDOM]
            found = np.clip(found, 1 / _FREEDOM, _FREEDOM)
            if not beyond:
                break
            free = [index for index in free if index not in beyond]
        return tuple(float(each) * common for each in found)
