import itertools

import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of

from kllm.sim.laws.base import Pool
from kllm.sim.laws.token_aware import TokenAware, TokenAwareSettings

FAST = TokenAwareSettings(up_pods=20, up_period=15.0)
CHUNK = {"chunk_tokens": 10_000}


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (4_600, 1),  # the guide's table: 0.46 s of backlog
        (9_100, 1),
        (15_200, 2),  # 1.52 s: the knee
        (42_500, 3),
        (61_000, 5),
    ],
)
def test_each_instance_may_have_a_second_and_a_half_of_backlog(tokens, wanted):
    law = TokenAware(setup_of(prefill=(1, 10), decode=(1, 10), **CHUNK), FAST)
    # One serves, so that the tolerance of 0.1 does not hide a step.
    view = pool_of({"queued_tokens": tokens}, desired=1)
    counts = law.decide(seen(0.0, prefill=view, decode=pool_of(0))).counts
    assert counts[Pool.PREFILL] == (wanted if abs(tokens / 15_000 - 1) > 0.1 else 1)


def test_decode_follows_the_sum_of_kv_in_use():
    law = TokenAware(setup_of(prefill=(1, 10), decode=(1, 10), **CHUNK), FAST)
    full = {"kv_used_tokens": 95, "kv_total_tokens": 100}
    counts = law.decide(seen(0.0, prefill=pool_of(0), decode=pool_of(full, full))).counts
    assert counts == {Pool.PREFILL: 1, Pool.DECODE: 3}  # 1.9 / 0.8


def test_one_pool_takes_the_larger_of_both():
    law = TokenAware(setup_of(one=(1, 10), **CHUNK), FAST)
    busy = {"queued_tokens": 40_000, "kv_used_tokens": 95, "kv_total_tokens": 100}
    assert law.decide(seen(0.0, one=pool_of(busy))).counts[Pool.ONE] == 3


def test_the_shipped_behaviour_adds_one_in_three_minutes_and_removes_one_in_five():
    law = TokenAware(setup_of(prefill=(1, 10), decode=(1, 10), **CHUNK), TokenAwareSettings())
    current, changes = 2, []
    for now in range(0, 2400, 15):
        tokens = 200_000 if now < 600 else 0
        view = pool_of(*([{"queued_tokens": tokens // current}] * current))
        following = law.decide(seen(float(now), prefill=view, decode=pool_of(0))).counts[Pool.PREFILL]
        if following != current:
            changes.append((now, following))
        current = following
    assert changes[:4] == [(0, 3), (180, 4), (360, 5), (540, 6)]
    downs = [now for now, _ in changes[4:]]
    assert downs[0] >= 600 + 300 - 15
    assert all(after - before >= 300 for before, after in itertools.pairwise(downs))
