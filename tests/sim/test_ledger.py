"""GPU time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.sim.laws.base import Pool
from kllm.sim.ledger import Ledger

P, D = Pool.PREFILL, Pool.DECODE


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.sampled_from([P, D]), st.integers(1, 8)), max_size=20
    ),
    st.integers(0, 60),
)
def test_it_adds_up_what_each_instance_held_after_the_count_began(held, since):
    ledger = Ledger([P, D], since=float(since))
    spans = [(min(a, b), max(a, b), pool, gpus) for a, b, pool, gpus in held]
    changes = [(begin, pool, gpus) for begin, _, pool, gpus in spans] + [
        (end, pool, -gpus) for _, end, pool, gpus in spans
    ]
    for at, pool, gpus in sorted(changes, key=lambda change: change[0]):
        ledger.change(pool, gpus, float(at))
    ledger.settle(100.0)
    for each in (P, D):
        expected = sum(max(0, end - max(begin, since)) * gpus for begin, end, pool, gpus in spans if pool is each)
        assert ledger.gpu_seconds[each] == pytest.approx(expected)


def test_the_peak_is_the_most_at_a_time_since_the_count_began():
    ledger = Ledger([P, D], since=10.0)
    ledger.change(P, 8, 0.0)
    ledger.change(P, -5, 5.0)
    ledger.change(D, 2, 20.0)
    ledger.change(D, -2, 30.0)
    ledger.settle(40.0)
    assert ledger.peak == 5
