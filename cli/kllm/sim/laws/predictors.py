"""Forecasts of the next value of a series, as Dynamo's planner offers them. Pure.

Source: ai-dynamo/dynamo, components/src/dynamo/planner/core/load/predictors.py: the last value; a Kalman filter with
level and trend (noise 1 and 0.1, of the measurement 10; from five values on); ARIMA with an automatic search for its
order. Such a search isn't rebuilt: `AR` is the nearest fixed member, a regression of the last difference on the one
before. Zeros before the first traffic are left out.
"""

from __future__ import annotations

import enum
import itertools

_LEAST_POINTS = 5
_LEVEL_NOISE, _TREND_NOISE, _MEASUREMENT_NOISE = 1.0, 0.1, 10.0
_FIRST_VARIANCE = 1000.0


class Kind(enum.StrEnum):
    """Which forecast."""

    CONSTANT = "constant"
    KALMAN = "kalman"
    AR = "ar"


class Predictor:
    """One series."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._values: list[float] = []
        self._level, self._trend = 0.0, 0.0
        self._variance = (_FIRST_VARIANCE, 0.0, _FIRST_VARIANCE)

    def add(self, value: float) -> None:
        """Take one more value."""
        if value == 0 and not self._values:
            return
        if not self._values:
            self._level = value
        else:
            self._filter(value)
        self._values.append(value)

    def next(self) -> float:
        """The value after the last one; 0 before any."""
        if not self._values:
            return 0.0
        if self._kind is Kind.CONSTANT or len(self._values) < _LEAST_POINTS:
            return self._values[-1]
        if self._kind is Kind.KALMAN:
            return max(0.0, self._level + self._trend)
        return max(0.0, self._values[-1] + self._coefficient() * (self._values[-1] - self._values[-2]))

    def _filter(self, value: float) -> None:
        """One step of the filter: state (level, trend), of which the level is measured."""
        a, b, c = self._variance
        a, b, c = a + 2 * b + c + _LEVEL_NOISE, b + c, c + _TREND_NOISE
        level = self._level + self._trend
        gain_level, gain_trend = a / (a + _MEASUREMENT_NOISE), b / (a + _MEASUREMENT_NOISE)
        error = value - level
        self._level, self._trend = level + gain_level * error, self._trend + gain_trend * error
        self._variance = ((1 - gain_level) * a, (1 - gain_level) * b, c - gain_trend * b)

    def _coefficient(self) -> float:
        """Least squares of each difference on the one before, kept where the series does not explode."""
        steps = [after - before for before, after in itertools.pairwise(self._values)]
        square = sum(step * step for step in steps[:-1])
        if square == 0:
            return 0.0
        product = sum(before * after for before, after in itertools.pairwise(steps))
        return min(max(product / square, -1.0), 1.0)
