"""Parked KV is bounded in tokens, requests and time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_engine.sglang.park import Committed, ParkLimits, admissible, overdue
from kllm_engine.sglang.selfcheck import park_limits

NOTHING = Committed(0, 0)
LIMITS = ParkLimits(tokens=100, requests=4, seconds=30)
lengths = st.lists(st.integers(1, 300), max_size=12)


def test_requests_are_admitted_up_to_the_watermark():
    assert admissible([40, 60, 1], committed=NOTHING, limits=LIMITS) == 2
    assert admissible([40], committed=Committed(1, 61), limits=LIMITS) == 0


def test_a_prompt_above_the_watermark_goes_when_nothing_else_is_parked():
    assert admissible([500, 1], committed=NOTHING, limits=LIMITS) == 1
    assert admissible([500], committed=Committed(1, 1), limits=LIMITS) == 0


def test_a_short_prompt_does_not_pass_a_long_one():
    assert admissible([80, 5], committed=Committed(1, 50), limits=LIMITS) == 0


def test_slots_are_bounded_too():
    assert admissible([1] * 9, committed=NOTHING, limits=LIMITS) == 4
    assert admissible([1] * 9, committed=Committed(3, 3), limits=LIMITS) == 1


@given(lengths, st.integers(0, 5), st.integers(0, 150))
def test_what_is_admitted_stays_below_the_limits(queue, requests, tokens):
    committed = Committed(requests, tokens)
    count = admissible(queue, committed=committed, limits=LIMITS)
    if count and requests + count > 1:
        assert tokens + sum(queue[:count]) <= LIMITS.tokens
        assert requests + count <= LIMITS.requests


@given(lengths)
def test_every_queue_drains_when_parked_requests_are_taken(queue):
    while queue:
        count = admissible(queue, committed=NOTHING, limits=LIMITS)
        assert count > 0
        queue = queue[count:]


def test_overdue_requests_are_told_longest_first():
    assert overdue({"a": 5.0, "b": 1.0, "c": 50.0}, now=40.0, limits=LIMITS) == ["b", "a"]
    assert overdue({"a": 10.1}, now=40.0, limits=LIMITS) == []


def test_limits_default_to_shares_of_the_engine():
    assert park_limits({}, pool_tokens=1000, request_slots=16) == ParkLimits(tokens=500, requests=12, seconds=120)
    given_ = {"KLLM_PARKED_LIMIT_TOKENS": "64", "KLLM_PARK_TIMEOUT_SECONDS": "2.5"}
    assert park_limits(given_, pool_tokens=1000, request_slots=1) == ParkLimits(tokens=64, requests=1, seconds=2.5)


@pytest.mark.parametrize("text", ["many", "0", "-3"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(ValueError, match=r"parked|KLLM_PARKED_LIMIT_TOKENS"):
        park_limits({"KLLM_PARKED_LIMIT_TOKENS": text}, pool_tokens=1000, request_slots=16)
