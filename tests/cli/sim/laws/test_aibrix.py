import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.sim.laws.aibrix import Aibrix, AibrixSettings, Strategy, apa
from kllm.sim.laws.base import Pool
from kllm.sim.laws.recommend import Metric

SETTINGS = AibrixSettings()


@pytest.mark.parametrize(
    ("use", "provisioned", "wanted"),
    [
        (55.0, 4, 4),  # 1.1 is still within the tolerance
        (60.0, 4, 5),  # 1.2·4 = 4.8
        (75.0, 4, 6),
        (500.0, 4, 8),  # at most twice
        (46.0, 4, 4),
        (40.0, 4, 4),  # 0.8·4 = 3.2, rounded up
        (30.0, 4, 3),
        (1.0, 5, 2),  # at least half, rounded down
        (0.0, 1, 0),
    ],
)
def test_apa_follows_the_ratio_between_half_and_twice(use, provisioned, wanted):
    assert apa(use, target=50.0, provisioned=provisioned, settings=SETTINGS) == wanted


@settings(deadline=None)
@given(st.floats(0, 1000), st.floats(0, 1000), st.integers(1, 50))
def test_more_use_never_wants_fewer(first, second, provisioned):
    low, high = sorted((first, second))
    assert apa(low, target=50.0, provisioned=provisioned, settings=SETTINGS) <= apa(
        high, target=50.0, provisioned=provisioned, settings=SETTINGS
    )


def kv(share):
    return {"kv_used_tokens": round(share * 100), "kv_total_tokens": 100}


def test_apa_asks_again_while_instances_start():
    law = Aibrix(setup_of(one=(1, 64)), SETTINGS)
    counts, current = [], 2
    for now in (0.0, 10.0, 20.0):
        view = pool_of(kv(0.8), kv(0.8), starting=current - 2)
        current = law.decide(seen(now, one=view)).counts[Pool.ONE]
        counts.append(current)
    assert counts == [4, 7, 12]  # 1.6 times each, on the count that includes those that start


def test_a_count_falls_only_after_the_cooldown():
    law = Aibrix(setup_of(one=(1, 8)), SETTINGS)
    current, fell = 4, []
    for now in range(0, 700, 10):
        share = 0.5 if now < 100 else 0.1
        following = law.decide(seen(float(now), one=pool_of(*([kv(share)] * current)))).counts[Pool.ONE]
        if following < current:
            fell.append(now)
        current = following
    assert fell[0] == 90 + 300


def test_kpa_panics_when_the_short_window_wants_twice_what_is_ready():
    settings = AibrixSettings(strategy=Strategy.KPA, metric=Metric.CONCURRENCY, target=10.0)
    law = Aibrix(setup_of(one=(1, 20)), settings)
    counts = []
    for now in range(0, 400, 10):
        load = 10 if now < 180 or now >= 240 else 60
        counts.append(law.decide(seen(float(now), one=pool_of(load, load))).counts[Pool.ONE])
    assert counts[17] == 2
    assert max(counts[18:24]) == 4  # twice the ready pods, though the stable window still wants less
    assert set(counts[24:36]) == {4}  # no fall while it panics


def test_kpa_is_stable_when_the_load_is():
    settings = AibrixSettings(strategy=Strategy.KPA, metric=Metric.CONCURRENCY, target=10.0)
    law = Aibrix(setup_of(one=(1, 20)), settings)
    counts = {law.decide(seen(now * 10.0, one=pool_of(15, 15))).counts[Pool.ONE] for now in range(60)}
    assert counts == {3}
