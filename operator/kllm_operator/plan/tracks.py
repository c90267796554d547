"""Level and trend of noisy series, with how far off they may be. Pure.

Each series is followed by several models at once, from one that hardly moves to one that believes whatever it saw
last. Each is a Kalman filter of a level and a damped trend; how well it foresaw what came decides its weight, and what
is unlikely to one model is taken over from the others (interacting multiple models, Blom and Bar-Shalom 1988). So a
flat series is averaged over a long time, and a step is followed within two or three observations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LEVEL = np.array([0.0015, 0.006, 0.02, 0.0015, 0.0015, 0.1, 0.5])
"""By how much of itself a level wanders in the square root of a second, by model. The last two swing and jump."""
_OF_WHAT_IS_SEEN = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
"""Whether it wanders by as much of what is seen, where that is more: from nothing, too, there is a way up. Only
of counts: a long prompt is no sign that all are long."""
_LEVEL_AHEAD = np.array([0.0015, 0.006, 0.02, 0.0015, 0.0015, 0.02, 0.006])
"""The same for what lies ahead: who has just jumped need not jump again."""
_TREND = np.array([0.0, 0.0, 0.0, 3e-5, 3e-4, 0.0, 0.0])
"""By how much of a level per second its trend changes in the square root of a second, by model."""
_TREND_SECONDS = 200.0
"""Time in which a trend that is not seen any more dies away."""
_SWITCH = np.array([2e-3, 8e-4, 2e-4, 4e-4, 2e-4, 8e-5, 8e-5])
"""Probability that within a second this model comes to hold, whichever held before. Swings and jumps are what chance
must not look like: at some times that, an hour of nothing but chance would see one."""
_MOST_SWITCH_SECONDS = 60.0
"""Time above which it grows no further, however long nothing was seen."""
_AFTER_A_JUMP = 0.9
"""Probability that after a jump one of the others holds again."""
_LEAST_EXPOSURE = 1e-3
"""Of what is seen: a thousandth of a second, or of a request, shows nothing."""
_NOISE_WEIGHT = 0.03
"""Of a new observation in what is known of the noise: about the last thirty count."""
_NOISE = (0.1, 50.0)
"""Bounds of the noise index: evenly spaced requests have almost none, crowds some ten times that of chance."""
_MOST_NEWS = 16.0
"""Most that one observation counts in the noise, as a multiple of what was known."""


def _transition(seconds: float) -> Array:
    """Probabilities of models, by the one that held and the one that holds so many seconds later."""
    switch = _SWITCH * min(seconds, _MOST_SWITCH_SECONDS)
    to = np.diag(np.full(len(switch), 1 - switch.sum())) + switch
    to[-1] = [*np.full(len(_SWITCH) - 1, _AFTER_A_JUMP / (len(_SWITCH) - 1)), 1 - _AFTER_A_JUMP]
    return np.asarray(to, dtype=np.float64)


@dataclass(frozen=True)
class Tracks:
    """Series of means over an exposure: requests over seconds, or tokens over requests.

    Attributes:
        power: how noise grows with the level, by series. 1: variance = noise · level / exposure, as of counts.
            2: variance = noise · level² / exposure, as of a mean of lengths.
        floor: level below which noise and wandering shrink no further, by series.
        noise: index of the noise, by series: 1 is that of chance for counts, and of exponential lengths.
        level, trend: by series and model.
        variance: of level, of both together, and of trend, by series and model.
        weight: of models, by series.
        seen: whether there was an observation, by series.
        last: the last one and its exposure, by series.
    """

    power: Array
    floor: Array
    noise: Array
    level: Array
    trend: Array
    variance: tuple[Array, Array, Array]
    weight: Array
    seen: Array
    last: tuple[Array, Array]

    @classmethod
    def of(cls, *, power: tuple[float, ...], floor: tuple[float, ...], noise: tuple[float, ...]) -> Tracks:
        """Series of which nothing is known yet."""
        series, models = len(power), len(_LEVEL)
        nothing = np.zeros((series, models))
        return cls(
            power=np.array(power),
            floor=np.array(floor),
            noise=np.array(noise),
            level=nothing,
            trend=nothing,
            variance=(nothing, nothing, nothing),
            weight=np.full((series, models), 1.0 / models),
            seen=np.zeros(series, dtype=np.float64),
            last=(np.zeros(series), np.zeros(series)),
        )

    def observe(self, values: Array, exposures: Array, *, seconds: float) -> Tracks:
        """Take what was seen.

        Args:
            values: means over the exposures, finite, by series.
            exposures: what they are means of, by series; 0: nothing was seen of this series.
            seconds: since the last observation.
        """
        exposures = np.where(exposures < _LEAST_EXPOSURE, 0.0, exposures)
        sees = exposures > 0
        weight, level, trend, variance = self._mixed(seconds)
        jumped = np.where(sees & (self.power == 1), values, 0.0)[:, None] * _OF_WHAT_IS_SEEN
        level, trend, variance = self._onward(level, trend, variance, seconds, least=jumped)
        exposed = np.where(sees, exposures, 1.0)[:, None]
        spread = self._noise_variance(level, exposed)
        total = variance[0] + spread
        error = values[:, None] - level
        # Counts are skewed: how likely one is, a normal distribution of the variance halfway to it tells better.
        halfway = variance[0] + self._noise_variance((level + values[:, None]) / 2, exposed)
        log = np.log(weight) - 0.5 * (np.log(halfway) + error * error / halfway)
        weight_after = np.exp(log - log.max(axis=1, keepdims=True))
        weight_after /= weight_after.sum(axis=1, keepdims=True)
        gain, slope = variance[0] / total, variance[1] / total
        updated = (
            weight_after,
            np.maximum(0.0, level + gain * error),
            trend + slope * error,
            ((1 - gain) * variance[0], (1 - gain) * variance[1], variance[2] - slope * variance[1]),
        )
        first = (
            np.full_like(weight, 1.0 / weight.shape[1]),
            np.broadcast_to(values[:, None], level.shape),
            np.zeros_like(trend),
            (
                self._noise_variance(values[:, None] + 0 * level, exposed),
                np.zeros_like(trend),
                self._trend_variance(values),
            ),
        )
        before = (weight, level, trend, variance)
        is_first = sees & (self.seen == 0)
        chosen = [
            np.where(is_first[:, None], one, np.where(sees[:, None], new, old))
            for one, new, old in zip(_flat(first), _flat(updated), _flat(before), strict=True)
        ]
        return Tracks(
            self.power,
            self.floor,
            self._noise_after(values, exposures),
            chosen[1],
            chosen[2],
            (chosen[3], chosen[4], chosen[5]),
            chosen[0],
            np.where(sees, 1.0, self.seen),
            (np.where(sees, values, self.last[0]), np.where(sees, exposures, self.last[1])),
        )

    def ahead(self, seconds: float) -> tuple[Array, Array]:
        """Mean and standard deviation of each series so many seconds after the last observation."""
        level, _, variance = self._onward(self.level, self.trend, self.variance, seconds, wander=_LEVEL_AHEAD)
        mean = (self.weight * level).sum(axis=1)
        off = variance[0] + (level - mean[:, None]) ** 2
        return np.maximum(0.0, mean), np.sqrt((self.weight * off).sum(axis=1))

    def _mixed(self, seconds: float) -> tuple[Array, Array, Array, tuple[Array, Array, Array]]:
        """What each model begins with, if another one may have held until now."""
        transition = _transition(seconds)
        weight = self.weight @ transition
        # By series, model that holds now, model that held.
        share = self.weight[:, None, :] * transition.T[None] / weight[:, :, None]
        level = (share * self.level[:, None, :]).sum(axis=2)
        trend = (share * self.trend[:, None, :]).sum(axis=2)
        off, turn = self.level[:, None, :] - level[:, :, None], self.trend[:, None, :] - trend[:, :, None]
        variance = (
            (share * (self.variance[0][:, None, :] + off * off)).sum(axis=2),
            (share * (self.variance[1][:, None, :] + off * turn)).sum(axis=2),
            (share * (self.variance[2][:, None, :] + turn * turn)).sum(axis=2),
        )
        # A model without a trend takes none over.
        steady = _TREND == 0
        trend = np.where(steady, 0.0, trend)
        return weight, level, trend, (
            variance[0], np.where(steady, 0.0, variance[1]), np.where(steady, 0.0, variance[2]),
        )  # fmt: skip

    def _onward(
        self,
        level: Array,
        trend: Array,
        variance: tuple[Array, Array, Array],
        seconds: float,
        *,
        wander: Array = _LEVEL,
        least: Array | float = 0.0,
    ) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        left = np.exp(-seconds / _TREND_SECONDS)
        far = _TREND_SECONDS * (1 - left)
        scale = np.maximum(np.maximum(level, self.floor[:, None]), least)
        moved = (scale * wander) ** 2 * seconds
        turned = (np.maximum(level, self.floor[:, None]) * _TREND) ** 2 * seconds
        after = (
            variance[0] + 2 * far * variance[1] + far * far * variance[2] + moved + turned * far * far / 3,
            left * (variance[1] + far * variance[2]) + turned * far / 2,
            left * left * variance[2] + turned,
        )
        return np.maximum(0.0, level + far * trend), left * trend, after

    def _noise_variance(self, level: Array, exposures: Array) -> Array:
        scale = np.maximum(level, np.maximum(self.floor[:, None], np.where(self.power[:, None] == 1, 1 / exposures, 0)))
        return np.asarray(self.noise[:, None] * scale ** self.power[:, None] / exposures)

    def _trend_variance(self, values: Array) -> Array:
        return np.asarray((np.maximum(values, self.floor)[:, None] * _TREND) ** 2 * _TREND_SECONDS)

    def _noise_after(self, values: Array, exposures: Array) -> Array:
        """From how far two observations lie apart, since that is noise far more than change."""
        both = (exposures > 0) & (self.seen > 0)
        scale = np.maximum((self.weight * self.level).sum(axis=1), self.floor)
        inverse = 1 / np.where(both, exposures, 1.0) + 1 / np.where(both, self.last[1], 1.0)
        news = (values - self.last[0]) ** 2 / (scale**self.power * inverse)
        news = np.minimum(news, _MOST_NEWS * self.noise)
        after = np.clip((1 - _NOISE_WEIGHT) * self.noise + _NOISE_WEIGHT * news, *_NOISE)
        return np.where(both, after, self.noise)


def _flat(parts: tuple[Array, Array, Array, tuple[Array, Array, Array]]) -> tuple[Array, ...]:
    return (*parts[:3], *parts[3])
