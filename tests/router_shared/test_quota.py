"""What keys may take at a time and in a minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_router.scheduling.choices import Refused
from kllm_router.scheduling.quota import NOTHING, Quota, Spent, Use, entry_refusal, token_refusal


def used(*, running=0, requests=0, tokens=0, at=0.0):
    use = Use()
    for number in range(requests):
        use.enter(at)
        if number >= running:
            use.leave()
    use.take(tokens, at)
    return use


@pytest.mark.parametrize(
    ("quota", "refused"),
    [
        (Quota(), False),
        (Quota(requests_per_minute=4, tokens_per_minute=101, concurrency=3), False),
        (Quota(requests_per_minute=3), True),
        (Quota(tokens_per_minute=100), True),
        (Quota(concurrency=2), True),
    ],
)
def test_each_bound_is_one_of_its_own(quota, refused):
    use = used(running=2, requests=3, tokens=100)

    assert (entry_refusal(quota, use, NOTHING, 1.0) is not None) is refused


@pytest.mark.parametrize("others", [Spent(running=3), Spent(requests=7), Spent(tokens=90)])
def test_what_other_routers_let_in_counts_as_if_it_were_here(others):
    quota = Quota(requests_per_minute=10, tokens_per_minute=100, concurrency=5)
    use = used(running=2, requests=3, tokens=10)

    assert entry_refusal(quota, use, NOTHING, 1.0) is None
    assert entry_refusal(quota, use, others, 1.0).reason is Refused.OVERLOADED


def test_after_the_time_that_a_refused_client_is_told_it_is_let_in():
    quota = Quota(requests_per_minute=3)
    use = Use()
    for second in (0.0, 20.0, 40.0):
        use.enter(second)
    refusal = entry_refusal(quota, use, NOTHING, 41.0)

    assert refusal.retry_after_seconds == pytest.approx(21.0)
    assert entry_refusal(quota, use, NOTHING, 41.0 + refusal.retry_after_seconds) is None


def test_a_prompt_is_granted_when_there_are_tokens_for_all_of_it():
    quota, use = Quota(tokens_per_minute=100), used(tokens=60)

    assert token_refusal(quota, use, NOTHING, 1.0, tokens=40) is None
    refusal = token_refusal(quota, use, NOTHING, 1.0, tokens=41)
    assert refusal.reason is Refused.OVERLOADED
    assert token_refusal(quota, use, NOTHING, 1.0 + refusal.retry_after_seconds, tokens=41) is None


def test_a_prompt_that_can_never_be_granted_is_no_matter_of_time():
    refusal = token_refusal(Quota(tokens_per_minute=100), Use(), NOTHING, 0.0, tokens=101)

    assert refusal.reason is Refused.TOO_LARGE
    assert refusal.retry_after_seconds is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 1000)), max_size=60))
def test_the_sliding_minute_is_right_to_a_slot(steps):
    use, now, taken = Use(), 0.0, []
    for pause, tokens in steps:
        now += pause
        use.take(tokens, now)
        taken.append((now, tokens))

        spent = use.spent(now).tokens
        assert spent >= sum(tokens for at, tokens in taken if at > now - 60)
        assert spent <= sum(tokens for at, tokens in taken if at > now - 62.1)


def test_what_was_told_long_ago_fades():
    assert Spent(3, 60, 600).aged(30) == Spent(0, 30, 300)
    assert Spent(3, 60, 600).aged(61) == NOTHING
