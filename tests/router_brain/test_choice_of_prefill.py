from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_brain.brain_helpers import instance

from kllm_core.fleet import InstanceState
from kllm_router.scheduling.choices import Choice, Refusal, Refused
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings, choose_prefill
from kllm_router.scheduling.prefix import PrefixMatch


def candidate(
    name: str,
    *,
    queued: int = 0,
    match: PrefixMatch | None = None,
    age: float | None = 0.1,
    unreported: int = 0,
    in_flight: int = 0,
    state: InstanceState = InstanceState.SERVING,
    **load: object,
) -> PrefillCandidate:
    made = instance(name, state=state, queued_uncached_tokens=queued, **load)
    return PrefillCandidate(made, age, match or PrefixMatch(), unreported, in_flight)


def chosen(candidates: list[PrefillCandidate], **arguments: object) -> str:
    decision = choose_prefill(candidates, **({"prompt_tokens": 1000} | arguments))
    assert isinstance(decision, Choice), decision
    return decision.instance_id


def test_the_shorter_queue_wins():
    assert chosen([candidate("a", queued=5000), candidate("b", queued=100)]) == "b"


def test_what_this_router_sent_and_the_load_does_not_show_counts_as_queue():
    assert chosen([candidate("a", unreported=5000), candidate("b", queued=100)]) == "b"


def test_a_cached_prefix_outweighs_a_short_queue_but_not_a_long_one():
    cached = PrefixMatch(device=60)

    assert chosen([candidate("a"), candidate("b", queued=500, match=cached)]) == "b"
    assert chosen([candidate("a"), candidate("b", queued=9000, match=cached)]) == "a"


def test_a_faster_tier_is_worth_more():
    host, disk = PrefixMatch(host=40), PrefixMatch(disk=40)

    assert chosen([candidate("a", match=disk), candidate("b", match=host)]) == "b"
    assert chosen([candidate("a", match=host), candidate("b", match=PrefixMatch(device=40))]) == "b"


def test_a_measured_rate_goes_before_the_model_and_stands_for_those_without_one():
    slow = candidate("a", queued=1000, prefill_tokens_per_second=100.0)
    fast = candidate("b", queued=3000, prefill_tokens_per_second=1000.0)
    unmeasured = candidate("c", queued=500)

    assert chosen([slow, fast]) == "b"
    # At the slower of the two known rates the one without a past still has the shorter queue in tokens only.
    assert chosen([slow, fast, unmeasured]) == "b"


@pytest.mark.parametrize("age", [None, 60.0])
def test_an_unknown_load_is_taken_only_for_want_of_a_better_one(age):
    unknown = candidate("a", age=age)

    assert chosen([unknown, candidate("b", queued=100_000)]) == "b"
    assert chosen([unknown]) == "a"


def test_parked_kv_at_its_limit_is_avoided_and_no_reason_to_refuse():
    full = candidate("a", parked_tokens=900, parked_limit_tokens=900)

    assert chosen([full, candidate("b", queued=100_000)]) == "b"
    decision = choose_prefill([full], prompt_tokens=10)
    assert isinstance(decision, Choice)


@pytest.mark.parametrize("state", [s for s in InstanceState if s is not InstanceState.SERVING])
def test_only_serving_instances_are_taken(state):
    assert chosen([candidate("a", state=state), candidate("b", queued=100_000)]) == "b"
    refusal = choose_prefill([candidate("a", state=state)], prompt_tokens=10)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Refused.NONE_SERVING
    assert state.value in refusal.message


def test_an_instance_that_failed_the_request_is_left_out():
    assert chosen([candidate("a"), candidate("b", queued=9000)], excluded=frozenset({"a"})) == "b"


def test_when_all_queues_are_too_long_the_client_is_told_when_to_come_back():
    settings = PrefillSettings(max_queue_seconds=10)
    busy = [candidate(n, queued=14_000 + k, prefill_tokens_per_second=1000.0) for k, n in enumerate("ab")]

    refusal = choose_prefill(busy, prompt_tokens=10, settings=settings)

    assert isinstance(refusal, Refusal)
    assert refusal.reason is Refused.OVERLOADED
    assert refusal.retry_after_seconds == pytest.approx(4.0)


def test_equals_take_turns_and_the_one_with_fewer_in_flight_goes_first():
    equal = [candidate(n) for n in "abc"]

    assert {chosen(equal, rotation=n) for n in range(3)} == {"a", "b", "c"}
    assert {chosen([candidate("a", in_flight=2), candidate("b", in_flight=1)], rotation=n) for n in range(3)} == {"b"}


@given(
    queues=st.lists(st.integers(0, 100_000), min_size=1, max_size=20),
    matches=st.lists(st.integers(0, 200), min_size=20, max_size=20),
    prompt=st.integers(1, 3000),
    rotation=st.integers(0, 1000),
)
def test_no_candidate_of_equal_standing_is_cheaper_than_the_chosen_one(queues, matches, prompt, rotation):
    candidates = [
        candidate(f"i{n:02}", queued=queue, match=PrefixMatch(device=matches[n])) for n, queue in enumerate(queues)
    ]

    decision = choose_prefill(candidates, prompt_tokens=prompt, rotation=rotation)

    assert isinstance(decision, Choice)
    costs = {cost.instance_id: cost.total for cost in decision.costs}
    assert costs[decision.instance_id] <= min(costs.values()) + 0.001
    assert all(seconds > 0 for seconds in costs.values())
