"""Noisy series are averaged for long while they are flat, and followed at once when they are not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm_operator.plan.tracks import Tracks

TICK = 5.0


def counts(rates, seed=1, tick=TICK):
    """What a stream of Poisson arrivals shows in each tick."""
    generator = np.random.default_rng(seed)
    return [generator.poisson(rate * tick) / tick for rate in rates]


def followed(values, exposure=TICK, tick=TICK, power=1.0):
    tracks, course = Tracks.of(power=(power,), floor=(0.01,), noise=(1.0,)), []
    for value in values:
        tracks = tracks.observe(np.array([value]), np.array([exposure]), seconds=tick)
        course.append(tracks)
    return course


def level(tracks, seconds=0.0):
    return float(tracks.ahead(seconds)[0][0])


def deviation(tracks, seconds=0.0):
    return float(tracks.ahead(seconds)[1][0])


@pytest.mark.parametrize("seed", range(3))
def test_a_flat_series_is_known_far_better_than_one_look_at_it(seed):
    course = followed(counts([4.0] * 720, seed=seed))
    levels = np.array([level(each) for each in course[60:]])

    assert abs(levels.mean() - 4.0) < 0.1
    assert levels.std() < 0.25 * np.sqrt(4.0 / TICK)
    assert abs(levels - 4.0).max() < 1.3


@pytest.mark.parametrize(("before", "after"), [(2.0, 8.0), (0.0, 5.0), (8.0, 2.0), (20.0, 40.0), (5.0, 0.0)])
def test_a_step_is_followed_within_three_looks(before, after):
    course = followed(counts([before] * 100 + [after] * 10))

    assert level(course[102]) == pytest.approx(after, abs=0.25 * abs(after - before) + 0.5)


def test_one_odd_look_does_not_move_what_is_flat_for_long():
    course = followed([4.0] * 60 + [5.5] + [4.0] * 20)

    assert max(level(each) for each in course[60:]) < 4.5
    assert level(course[-1]) == pytest.approx(4.0, abs=0.1)


def test_a_rise_is_foreseen_and_dies_away_when_it_ends():
    rising = [2.0 + 0.01 * TICK * tick for tick in range(120)]
    course = followed(rising + [8.0] * 80)

    assert level(course[119], 60.0) > level(course[119]) + 0.3
    assert level(course[119], 60.0) == pytest.approx(rising[119] + 0.6, rel=0.05)
    assert level(course[-1], 60.0) == pytest.approx(8.0, rel=0.03)


def test_the_further_ahead_the_less_is_known():
    tracks = followed(counts([4.0] * 200))[-1]
    spreads = [deviation(tracks, seconds) for seconds in (0.0, 10.0, 60.0, 300.0)]

    assert spreads == sorted(spreads)
    assert spreads[-1] > 2 * spreads[0]


def test_noise_is_learned_in_both_directions():
    generator = np.random.default_rng(3)
    even = followed([4.0] * 300)[-1]
    crowds = followed([8 * generator.poisson(4.0 * TICK / 8) / TICK for _ in range(300)])[-1]

    assert even.noise[0] < 0.3
    assert 4.0 < crowds.noise[0] < 14.0


def test_lengths_have_the_noise_of_their_own_spread():
    generator = np.random.default_rng(5)
    course = followed([generator.exponential(1000.0, 20).mean() for _ in range(400)], exposure=20.0, power=2.0)

    assert course[-1].noise[0] == pytest.approx(1.0, abs=0.4)
    assert level(course[-1]) == pytest.approx(1000.0, rel=0.1)


def test_what_is_not_seen_changes_nothing_but_what_is_known_of_it():
    tracks = Tracks.of(power=(1.0, 2.0), floor=(0.01, 1.0), noise=(1.0, 1.0))
    tracks = tracks.observe(np.array([3.0, 700.0]), np.array([5.0, 15.0]), seconds=5.0)
    later = tracks.observe(np.array([3.0, 0.0]), np.array([5.0, 0.0]), seconds=5.0)

    assert later.ahead(0.0)[0][1] == pytest.approx(700.0)
    assert list(later.seen) == [1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0.01, 1e5)), min_size=1, max_size=40),
    st.floats(0, 1e5), st.sampled_from([1.0, 2.0]),
)  # fmt: skip
def test_whatever_is_seen_levels_are_finite_and_weights_are_shares(looks, ahead, power):
    tracks = Tracks.of(power=(power,), floor=(0.01,), noise=(1.0,))
    for value, exposure, seconds in looks:
        tracks = tracks.observe(np.array([value]), np.array([exposure]), seconds=seconds)
        mean, spread = tracks.ahead(ahead)

        assert np.isfinite(mean).all()
        assert np.isfinite(spread).all()
        assert (mean >= 0).all()
        assert tracks.weight.sum() == pytest.approx(1.0)
