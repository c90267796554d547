import itertools
from dataclasses import replace

import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.sim.laws.base import Latencies, Pool
from kllm.sim.laws.histogram import TPOT_BOUNDS, quantile
from kllm.sim.laws.llm_d import LlmD, LlmDSettings, Signal, Statistic, desired

SETTINGS = LlmDSettings()
MEASURED = LlmDSettings(signal=Signal.MEASURED)


@pytest.mark.parametrize(
    ("saturation", "provisioned", "ready", "wanted"),
    [
        (0.55, 3, 3, 3),
        (0.56, 3, 3, 4),  # 3·(0.56/0.55 - 1) = 0.05, rounded up
        (1.10, 3, 3, 6),  # twice the threshold doubles
        (2.00, 3, 3, 11),  # the cap: 3·(2/0.55 - 1) = 7.9
        (1.10, 6, 3, 6),  # half of them start: 1.1·0.5 = 0.55, nothing more is asked for
        (2.00, 6, 3, 11),
        (1.10, 3, 0, 6),  # none ready: no credit
        (0.40, 8, 8, 8),
        (0.45, 8, 8, 8),  # in the band
        (0.30, 8, 8, 6),  # 8·0.25 = 2
        (0.00, 8, 8, 0),
        (0.30, 8, 4, 6),  # no credit on the way down
    ],
)
def test_the_formula_gives_the_counts_of_the_guide(saturation, provisioned, ready, wanted):
    assert desired(saturation, provisioned=provisioned, ready=ready, settings=SETTINGS) == wanted


@settings(deadline=None)
@given(st.floats(0, 2), st.floats(0, 2), st.integers(1, 30), st.integers(0, 30))
def test_more_saturation_never_wants_fewer(first, second, provisioned, ready):
    low, high = sorted((first, second))
    counts = [
        desired(value, provisioned=provisioned, ready=min(ready, provisioned), settings=SETTINGS)
        for value in (low, high)
    ]
    credited = high > SETTINGS.up_above and 0 < ready < provisioned
    assert counts[0] <= counts[1] or credited


def run(law, signal, *, until, current=3, ready=None):
    """Feed a measured TTFT over time; the pool follows at once unless `ready` says how many serve."""
    counts = {}
    for now in range(0, until + 1, 5):
        serving = current if ready is None else ready
        view = pool_of(*([10] * serving), starting=current - serving, desired=current)
        current = law.decide(seen(float(now), window=60.0, ttft=signal(now) * 3.0, one=view)).counts[Pool.ONE]
        counts[now] = current
    return counts


def test_a_step_over_the_threshold_grows_after_smoothing_and_the_windows_of_the_autoscaler():
    law = LlmD(setup_of(one=(3, 8)), MEASURED)
    counts = run(law, lambda now: 0.3 if now < 100 else 1.0, until=200)
    # Rules at 105, 120, 135 lift the mean of three to 0.53, 0.77 and 1.0; growth holds for 30 s before it is believed.
    assert counts[105] == counts[120] == counts[130] == 3
    assert max(counts.values()) > 3
    first = min(now for now, count in counts.items() if count > 3)
    assert 135 <= first <= 150


def test_nothing_happens_in_the_band():
    law = LlmD(setup_of(one=(3, 8)), MEASURED)
    assert set(run(law, lambda _: 0.47, until=1200, current=5).values()) == {5}


def test_the_way_down_is_one_instance_in_two_minutes_after_three():
    law = LlmD(setup_of(one=(3, 8)), MEASURED)
    counts = run(law, lambda now: 0.5 if now < 60 else 0.1, until=1200, current=8)
    drops = [now for now in range(5, 1201, 5) if counts[now] < counts[now - 5]]
    assert drops[0] >= 60 + 180
    assert all(after - before >= 120 for before, after in itertools.pairwise(drops))
    assert counts[1200] == 3


def test_the_credit_keeps_it_from_asking_again_while_instances_start():
    law = LlmD(setup_of(one=(3, 20)), MEASURED)
    counts = run(law, lambda _: 1.0, until=300, current=6, ready=3)
    assert set(counts.values()) == {6}


def test_no_traffic_counts_as_no_saturation():
    law = LlmD(setup_of(one=(2, 8)), SETTINGS)
    current = 4
    for now in range(0, 901, 5):
        view = pool_of(*([0] * current))
        current = law.decide(seen(float(now), rate=0, one=view)).counts[Pool.ONE]
    assert current == 2


def test_the_prediction_grows_the_pool_before_anything_slow_was_measured():
    law = LlmD(setup_of(one=(3, 8)), SETTINGS)
    current = 3
    for now in range(0, 91, 5):
        view = pool_of(*([{"queued_tokens": 60_000, "running_requests": 10}] * current))
        current = law.decide(seen(float(now), window=60.0, ttft=0.3, one=view)).counts[Pool.ONE]
    assert current > 3  # 60,000 tokens are 6 s of prefill against an objective of 3 s


def test_a_cold_predictor_tells_no_more_than_it_has_seen():
    law = LlmD(setup_of(one=(3, 8)), LlmDSettings(signal=Signal.COLD))
    current = 3
    for now in range(0, 301, 5):
        view = pool_of(*([{"queued_tokens": 60_000, "running_requests": 10}] * current))
        current = law.decide(seen(float(now), window=60.0, ttft=0.3, one=view)).counts[Pool.ONE]
    assert current == 3


def test_ttft_moves_prefill_only_and_tpot_decode_only():
    law = LlmD(setup_of(prefill=(1, 8), decode=(1, 8)), MEASURED)
    counts = {Pool.PREFILL: 2, Pool.DECODE: 2}
    for now in range(0, 200, 5):
        prefill, decode = (pool_of(*([5] * counts[pool])) for pool in (Pool.PREFILL, Pool.DECODE))
        counts = law.decide(seen(float(now), ttft=3.0, tpot=0.045, prefill=prefill, decode=decode)).counts
    assert counts[Pool.PREFILL] > 2
    assert counts[Pool.DECODE] == 2


def test_thresholds_that_cross_are_refused():
    with pytest.raises(ValueError, match="down_below <= up_above"):
        LlmDSettings(up_above=0.3, down_below=0.4)


@pytest.mark.parametrize(
    ("statistic", "grows"), [(Statistic.HISTOGRAM, True), (Statistic.EXACT, False), (Statistic.MEAN, False)]
)
def test_what_the_histogram_cannot_tell_apart_counts_as_more(statistic, grows):
    law = LlmD(setup_of(one=(3, 8)), LlmDSettings(signal=Signal.MEASURED, statistic=statistic))
    current = 3
    for now in range(0, 301, 5):
        tpot = Latencies(0.045, 0.045, 0.045, 0.045, 50, (0.045,) * 50)  # 45 ms reads as 58 ms: 0.58 of 100 ms
        observation = replace(seen(float(now), one=pool_of(*([10] * current))), tpot=tpot)
        current = law.decide(observation).counts[Pool.ONE]
    assert (current > 3) == grows


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], 0.0),
        ([0.03] * 10, 0.038),
        ([0.01, 0.03], 0.036),  # half of the upper bucket's one: 20 + 0.8·20
        ([500.0], 360.0),
        ([0.0001], 0.00045),
    ],
)
def test_a_quantile_lies_where_its_bucket_is_full_enough(values, wanted):
    assert quantile(0.9, values, TPOT_BOUNDS) == pytest.approx(wanted)
