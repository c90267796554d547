import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.sim.laws.base import Bounds
from kllm.sim.laws.behaviour import Behaviour, Policy, Rules, Shaper

WIDE = Bounds(0, 1000)


def test_a_lower_recommendation_waits_until_the_window_holds_nothing_higher():
    shaper = Shaper(Behaviour(), WIDE)
    assert shaper.shape(0.0, current=5, recommended=5) == 5
    assert shaper.shape(15.0, current=5, recommended=2) == 5
    assert shaper.shape(299.0, current=5, recommended=2) == 5
    assert shaper.shape(300.0, current=5, recommended=2) == 2


def test_the_highest_recommendation_of_the_window_holds_on_the_way_down():
    shaper = Shaper(Behaviour(), WIDE)
    shaper.shape(0.0, current=8, recommended=8)
    shaper.shape(100.0, current=8, recommended=6)
    shaper.shape(200.0, current=8, recommended=3)
    assert shaper.shape(301.0, current=8, recommended=3) == 6


def test_growth_in_a_period_is_limited_by_the_policy_that_allows_most():
    shaper = Shaper(Behaviour(), WIDE)
    assert shaper.shape(0.0, current=1, recommended=50) == 5  # 4 pods rather than 100 %
    assert shaper.shape(5.0, current=5, recommended=50) == 5  # the same period
    assert shaper.shape(20.0, current=5, recommended=50) == 10  # 100 % rather than 4 pods


def test_a_period_counts_from_what_there_was_when_it_began():
    behaviour = Behaviour(up=Rules(0.0, (Policy(60.0, pods=2),)))
    shaper = Shaper(behaviour, WIDE)
    assert shaper.shape(0.0, current=3, recommended=4) == 4
    assert shaper.shape(30.0, current=4, recommended=9) == 5
    assert shaper.shape(59.0, current=5, recommended=9) == 5
    assert shaper.shape(60.0, current=5, recommended=9) == 6


def test_one_instance_in_two_minutes_goes_when_that_is_the_policy():
    behaviour = Behaviour(down=Rules(0.0, (Policy(120.0, pods=1),)))
    shaper = Shaper(behaviour, WIDE)
    counts, current = [], 8
    for now in range(0, 361, 15):
        current = shaper.shape(float(now), current=current, recommended=3)
        counts.append(current)
    assert counts[0] == counts[7] == 7
    assert counts[8] == 6
    assert current == 4


def test_growth_waits_for_its_own_window():
    behaviour = Behaviour(up=Rules(30.0, (Policy(60.0, pods=4),)))
    shaper = Shaper(behaviour, WIDE)
    assert shaper.shape(0.0, current=3, recommended=3) == 3
    assert shaper.shape(15.0, current=3, recommended=7) == 3
    assert shaper.shape(30.0, current=3, recommended=6) == 6


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 400.0), st.integers(-5, 40)), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(5, 12),
)
def test_counts_stay_within_bounds_and_move_only_towards_what_was_recommended(steps, least, most):
    shaper, now, current = Shaper(Behaviour(), Bounds(least, most)), 0.0, least
    recommended = []
    for pause, wanted in steps:
        now += pause
        recommended.append(wanted)
        following = shaper.shape(now, current=current, recommended=wanted)
        assert least <= following <= most
        assert following <= max(current, wanted)
        assert following >= min(current, max(least, min(recommended)))
        current = following


@pytest.mark.parametrize(("start", "highest", "lowest"), [(0, 0, 0), (1, 2, 0), (3, 5, 1), (4, 6, 2)])
def test_half_of_a_count_is_rounded_in_favour_of_the_change(start, highest, lowest):
    policy = Policy(15.0, percent=50.0)
    assert policy.highest(start) == highest
    assert policy.lowest(start) == lowest
