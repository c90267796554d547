from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kllm_router.scheduling.budget import BudgetSettings, RetryBudget

SETTINGS = BudgetSettings(share=0.2, window_seconds=10.0, floor=3)


def test_a_quiet_router_may_retry_up_to_the_floor():
    budget = RetryBudget(SETTINGS)
    assert [budget.spend(0.0, in_flight=0) for _ in range(4)] == [True, True, True, False]
    assert budget.spend(10.5, in_flight=0)


def test_requests_of_the_window_and_those_in_flight_raise_the_limit():
    budget = RetryBudget(SETTINGS)
    for _ in range(50):
        budget.arrived(100.0)
    assert budget.limit(100.0, in_flight=0) == 13
    assert budget.limit(100.0, in_flight=100) == 23
    assert budget.limit(111.0, in_flight=0) == 3


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_no_window_holds_more_retries_than_its_requests_allow(steps, floor, share):
    settings = BudgetSettings(share=share, window_seconds=10.0, floor=floor)
    budget, now = RetryBudget(settings), 0.0
    requests: list[float] = []
    retries: list[float] = []
    for pause, is_retry in steps:
        now += pause
        if is_retry:
            if budget.spend(now, in_flight=0):
                retries.append(now)
                recent = [at for at in requests if at > now - 10.0]
                # Slots make what is counted up to a slot younger than the window.
                assert len([at for at in retries if at > now - 9.5]) <= floor + share * len(recent) + 1e-9
        else:
            budget.arrived(now)
            requests.append(now)
