from fractions import Fraction

import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kllm.sim.laws.base import Bounds, Pool
from kllm.sim.laws.kthena import Kthena, KthenaSettings
from kllm.sim.laws.ratio import within_ratio


@pytest.mark.parametrize(
    ("counts", "bounds", "ratio", "wanted"),
    [
        ((2, 4), ((0, 8), (0, 16)), ("0.25", "1"), (2, 4)),  # within
        ((1, 8), ((0, 8), (0, 16)), ("0.25", "1"), (2, 8)),  # too few prefill: more prefill
        ((6, 2), ((0, 8), (0, 16)), ("0.25", "1"), (6, 6)),  # too many: more decode
        ((2, 20), ((0, 3), (0, 20)), ("0.25", "1"), (3, 12)),  # prefill at its most, then less decode
        ((1, 3), ((1, 10), (1, 10)), ("0.5", "0.5"), (2, 4)),  # 1.5 prefill do not exist
        ((7, 99), ((7, 7), (1, 100)), ("0.07", "0.07"), (7, 100)),  # an exact decimal
        ((0, 4), ((0, 8), (0, 16)), ("0.25", "1"), (1, 4)),
        ((4, 0), ((0, 8), (0, 16)), ("0.25", "1"), (4, 4)),
        ((0, 0), ((0, 8), (0, 16)), ("0.25", "1"), (0, 0)),  # both at rest
        ((10, 4), ((0, 8), (0, 16)), ("0", "100"), (8, 4)),  # only bounds
    ],
)
def test_the_ratio_is_repaired_upwards_where_bounds_allow(counts, bounds, ratio, wanted):
    assert (
        within_ratio(
            *counts,
            prefill_bounds=Bounds(*bounds[0]),
            decode_bounds=Bounds(*bounds[1]),
            least=Fraction(ratio[0]),
            most=Fraction(ratio[1]),
        )
        == wanted
    )


def test_a_ratio_that_no_counts_have_is_refused():
    half = Fraction("0.55")
    with pytest.raises(ValueError, match="no counts within the bounds"):
        within_ratio(1, 2, prefill_bounds=Bounds(1, 2), decode_bounds=Bounds(2, 3), least=half, most=half)


@settings(deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20),
    st.fractions(Fraction(1, 8), 8, max_denominator=8), st.fractions(Fraction(1, 8), 8, max_denominator=8),
)  # fmt: skip
def test_repaired_counts_keep_bounds_and_ratio_and_settle(prefill, decode, most_prefill, most_decode, one, other):
    least, most = sorted((one, other))
    bounds = {"prefill_bounds": Bounds(1, most_prefill), "decode_bounds": Bounds(1, most_decode)}
    pairs = [
        (p, d) for p in range(1, most_prefill + 1) for d in range(1, most_decode + 1) if least <= Fraction(p, d) <= most
    ]
    assume(pairs)
    repaired = within_ratio(prefill, decode, **bounds, least=least, most=most)
    assert repaired in pairs
    assert within_ratio(*repaired, **bounds, least=least, most=most) == repaired


def test_the_roles_follow_their_metrics_and_then_the_ratio():
    law = Kthena(setup_of(prefill=(1, 16), decode=(1, 16)), KthenaSettings(most_ratio=2.0))
    prefill = pool_of(*([{"queued_requests": 4}] * 2))  # twice the target of 2
    decision = law.decide(seen(0.0, prefill=prefill, decode=pool_of(32)))
    assert decision.counts == {Pool.PREFILL: 4, Pool.DECODE: 2}
    assert decision.reason == "Ratio"


def test_a_panic_is_followed_at_once_and_holds():
    law = Kthena(setup_of(one=(1, 64)), KthenaSettings())
    first = law.decide(seen(0.0, one=pool_of(640, 640))).counts[Pool.ONE]
    assert first == 22  # 1,280 requests want 40; ten times more than two is the limit
    held = law.decide(seen(15.0, one=pool_of(*([1] * 22)))).counts[Pool.ONE]
    assert held == 22


def test_within_the_tolerance_nothing_changes():
    law = Kthena(setup_of(one=(1, 64)), KthenaSettings())
    assert law.decide(seen(0.0, one=pool_of(35, 35))).counts[Pool.ONE] == 2
