import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.sim.laws.base import EngineView, PoolView
from kllm.sim.laws.recommend import Metric, external, per_pod

VALUES = st.lists(st.floats(0, 1000), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("values", "target", "current", "wanted"),
    [
        ([200.0], 100.0, 1, 2),  # Kubernetes' own example: 200m of 100m doubles
        ([50.0, 50.0], 100.0, 2, 1),  # and 50m halves
        ([110.0, 110.0], 100.0, 2, 2),  # within the tolerance of 0.1
        ([111.0, 111.0], 100.0, 2, 3),
        ([91.0] * 10, 100.0, 10, 10),
        ([89.0] * 10, 100.0, 10, 9),
    ],
)
def test_the_count_follows_the_ratio_outside_of_the_tolerance(values, target, current, wanted):
    assert per_pod(values, target=target, current=current, tolerance=0.1) == wanted


@pytest.mark.parametrize(
    ("values", "current", "wanted"),
    [
        ([30.0, 30.0], 3, 6),  # three times the target on two of three: 60 / 10, the third counts as 0
        ([14.0, 14.0], 4, 4),  # 1.4 becomes 0.7 with the two that start: the direction turns, nothing changes
        ([2.0, 2.0], 3, 2),  # on the way down the one that starts counts as at its target: 14 / 10
        ([2.0, 2.0], 4, 3),  # 24 / 10
        ([], 3, 3),  # nothing is known
    ],
)
def test_pods_that_start_are_judged_conservatively(values, current, wanted):
    assert per_pod(values, target=10.0, current=current, tolerance=0.1) == wanted


@pytest.mark.parametrize(
    ("value", "current", "wanted"), [(0.0, 3, 0), (4.6, 3, 3), (5.1, 3, 4), (3.0, 0, 2), (8.5, 5, 6)]
)
def test_a_value_of_the_whole_pool_is_shared_by_its_pods(value, current, wanted):
    assert external(value, target=1.5, current=current, tolerance=0.1) == wanted


@settings(deadline=None)
@given(VALUES, st.floats(0.1, 1000), st.integers(0, 10))
def test_missing_pods_never_make_it_grow_further_nor_shrink_further(values, target, missing):
    current = len(values) + missing
    without = per_pod(values, target=target, current=len(values), tolerance=0.1)
    wanted = per_pod(values, target=target, current=current, tolerance=0.1)
    assert wanted >= 0
    if wanted > current:
        assert wanted <= without
    if wanted < current:
        assert wanted >= min(without, current)


@settings(deadline=None)
@given(VALUES, st.floats(0.1, 1000), st.floats(1.0, 5.0))
def test_more_load_never_wants_fewer(values, target, factor):
    current = len(values)
    more = [value * factor for value in values]
    assert per_pod(more, target=target, current=current, tolerance=0.1) >= per_pod(
        values, target=target, current=current, tolerance=0.1
    ) or math.isclose(sum(more), sum(values))


def test_metrics_are_means_over_serving_engines():
    engines = (
        EngineView(queued_requests=3, running_requests=5, queued_tokens=900, kv_used_tokens=40, kv_total_tokens=80),
        EngineView(running_requests=2, utilisation=0.5),
    )
    pool = PoolView(engines=engines)
    assert Metric.CONCURRENCY.mean(pool) == 5.0
    assert Metric.QUEUE.mean(pool) == 1.5
    assert Metric.TOKENS.mean(pool) == 450.0
    assert Metric.KV.mean(pool) == 0.25
    assert Metric.UTILISATION.mean(pool) == 0.25
    assert Metric.KV.mean(PoolView()) == 0.0
