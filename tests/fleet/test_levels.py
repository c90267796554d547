"""Routers' reports become a forecast and measured stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_core.objectives import Role
from kllm_operator.fleet.histogram import BUCKETS, percentile_seconds, total
from kllm_operator.fleet.levels import LevelReport, Levels, StageCounts
from kllm_operator.plan.demand import Forecast

NEVER = dict.fromkeys(Role)


def counts(*times):
    """A histogram of some times in seconds."""
    found = [0] * BUCKETS
    for seconds in times:
        found[sum(bound < seconds for bound in LATENCY_BOUNDS_SECONDS)] += 1
    return StageCounts(tuple(found), sum(times))


def report(at, arrivals=0, router="r", **stages):
    return LevelReport(
        router, at, 1.0, arrivals, prompt_tokens=100 * arrivals, cached_tokens=20 * arrivals,
        output_tokens=10 * arrivals, stages={name: counts(*times) for name, times in stages.items()},
    )  # fmt: skip


def levels(*reports):
    made = Levels()
    for each in reports:
        made.add(each)
    return made


def stages(made, now, **ages):
    changed = NEVER | {Role(role): age for role, age in ages.items()}
    return made.stages(now, percentile=90, changed_age_seconds=changed.__getitem__)


def test_the_rate_is_that_of_the_busier_window():
    quiet, busy = [report(t, 2, ttft=(0.1, 0.1)) for t in range(20)], [report(t, 8) for t in range(20, 30)]

    assert levels(*quiet, *busy).forecast(29.5).requests_per_second == pytest.approx(8.0, abs=1)
    later = levels(*quiet, *busy, *[report(t, 0) for t in range(30, 42)])
    assert 1.0 < later.forecast(41.5).requests_per_second < 8.0


def test_no_traffic_is_a_rate_of_zero_and_silence_is_unknown():
    idle = levels(*[report(t) for t in range(40)])

    assert idle.forecast(39.5).requests_per_second == 0.0
    assert idle.forecast(45.0) == Forecast()
    assert Levels().forecast(0.0) == Forecast()


def test_a_first_request_is_no_rate_of_one_per_second():
    assert levels(report(1.0, 1)).forecast(1.0).requests_per_second == pytest.approx(0.1)


def test_routers_add_up():
    both = [report(t, 3, router=name) for t in range(30) for name in ("a", "b")]

    assert levels(*both).forecast(29.5).requests_per_second == pytest.approx(6.0)


def test_means_are_per_request_and_outlive_a_pause():
    made = levels(*[report(t, 2, ttft=(0.1, 0.1)) for t in range(10)])
    forecast = made.forecast(9.5)
    assert (forecast.uncached_tokens, forecast.cached_tokens, forecast.output_tokens) == (80.0, 20.0, 10.0)
    for second in range(10, 60):
        made.add(report(second))

    assert made.forecast(59.5).output_tokens == 10.0
    assert made.forecast(59.5).requests_per_second == 0.0


def test_means_are_those_of_the_last_requests():
    long = [LevelReport("r", t, 1.0, 2, 2000, output_tokens=200, stages={"ttft": counts(1, 1)}) for t in range(10)]
    short = [report(t, 2, ttft=(0.1, 0.1)) for t in range(10, 20)]

    assert levels(*long).forecast(9.5).output_tokens == 100.0
    assert levels(*long, *short).forecast(19.5).output_tokens == 10.0
    assert levels(*long, *short).forecast(19.5).uncached_tokens == 80.0


def test_a_stage_is_its_percentile_with_the_ages_of_its_requests():
    made = levels(*[report(t, 1, queue=(0.4,) * 9 + (4.0,)) for t in range(10)])
    queue = stages(made, 10.0).queue

    assert 0.3 < queue.seconds <= 0.5
    assert queue.samples == 100
    assert queue.newest_age_seconds == 1.0
    assert queue.oldest_age_seconds == 11.0
    assert stages(made, 10.0).tpot is None


def test_what_a_former_capacity_took_does_not_count():
    slow = [report(t, 1, queue=(8.0,), tpot=(8.0,)) for t in range(10)]
    fast = [report(t, 1, queue=(0.1,), tpot=(0.1,)) for t in range(10, 20)]
    made = stages(levels(*slow, *fast), 19.5, prefill=10.0)

    assert made.queue.seconds <= 0.1
    assert made.tpot.seconds > 5
    assert made.queue.believed(changed_age_seconds=10.0, stale_after_seconds=10.0, least_samples=5) is not None


def test_a_request_that_came_before_the_change_does_not_count_when_it_ends_after_it():
    """Requests take five seconds, so those that end within five seconds of the change had come before it."""
    long = [report(t, 1, queue=(5.0,), ttft=(5.0,)) for t in range(20)]

    assert stages(levels(*long), 19.5, prefill=5.0).queue is None
    assert stages(levels(*long), 19.5, prefill=9.0).queue is not None


def test_a_histogram_of_another_release_is_left_out():
    assert total([(1, 2, 3)]) == [0] * BUCKETS


@given(st.lists(st.floats(0.0005, 110), min_size=1, max_size=60), st.integers(1, 99))
def test_a_percentile_lies_within_the_bucket_of_the_true_one(times, percentile):
    found = percentile_seconds(counts(*times).counts, percentile)
    ordered = sorted(times)
    rank = max(0, -(-len(ordered) * percentile // 100) - 1)
    above = next(bound for bound in LATENCY_BOUNDS_SECONDS if bound >= ordered[rank])
    below = max((bound for bound in LATENCY_BOUNDS_SECONDS if bound < ordered[rank]), default=0.0)

    assert below <= found <= above


def test_an_empty_histogram_has_no_percentile_and_what_is_beyond_the_last_bound_counts_as_it():
    assert percentile_seconds([0] * BUCKETS, 90) is None
    assert percentile_seconds(counts(500.0).counts, 90) == LATENCY_BOUNDS_SECONDS[-1]


def test_whoever_waits_for_a_start_counts_as_traffic_until_it_is_served():
    silent = [report(t) for t in range(60)]
    waited = levels(*[replace(each, waiting=30) for each in silent])

    assert waited.forecast(59.5).requests_per_second == pytest.approx(1.0)
    waited.add(report(60))
    assert waited.forecast(60.5).requests_per_second == 0.0
    both = levels(replace(report(59), waiting=6), replace(report(59, router="other"), waiting=3))
    assert both.forecast(59.5).requests_per_second == pytest.approx(0.3)


def test_a_percentile_is_exceeded_only_by_more_than_chance():
    def measured(slow):
        times = [0.1] * 10
        reports = [report(t, 10, ttft=times, queue=[9.0, *times[1:]] if t < slow else times) for t in range(30)]
        return levels(*reports).stages(29.5, percentile=99, changed_age_seconds=NEVER.__getitem__).queue.seconds

    assert measured(slow=5) < 1.0
    assert measured(slow=20) > 5.0


def test_stages_that_belong_together_are_measured_together():
    reports = [report(t, 1, ttft=[1.0], queue=[0.2], prefilled=[0.5], handover=[0.3]) for t in range(30)]
    found = stages(levels(*reports), 29.5)

    assert found.prefilled.seconds == pytest.approx(0.5, rel=0.3)
    assert found.handover.seconds == pytest.approx(0.3, rel=0.3)
    assert found.transfer is None
