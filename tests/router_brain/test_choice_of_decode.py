from __future__ import annotations

import pytest
from router_brain.brain_helpers import instance

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_router.scheduling.admission import AdmissionSettings, admit
from kllm_router.scheduling.choices import Choice, Refusal, Refused
from kllm_router.scheduling.decode import DecodeCandidate, choose_decode
from kllm_router.scheduling.prefill import PrefillCandidate


def candidate(
    name: str,
    *,
    running: int = 0,
    age: float | None = 0.1,
    requests: int = 0,
    tokens: int = 0,
    in_flight: int = 0,
    state: InstanceState = InstanceState.SERVING,
    **load: object,
) -> DecodeCandidate:
    facts = {"running_requests": running, "kv_used_tokens": 0, "kv_total_tokens": 100_000} | load
    return DecodeCandidate(instance(name, Role.DECODE, state, **facts), age, requests, tokens, in_flight)


def chosen(candidates: list[DecodeCandidate], **arguments: object) -> str:
    decision = choose_decode(candidates, **({"prompt_tokens": 1000} | arguments))
    assert isinstance(decision, Choice), decision
    return decision.instance_id


def test_the_smaller_batch_wins():
    assert chosen([candidate("a", running=20), candidate("b", running=3)]) == "b"
    assert chosen([candidate("a", queued_requests=20), candidate("b", running=3)]) == "b"
    assert chosen([candidate("a", requests=20, tokens=2000), candidate("b", running=3)]) == "b"


def test_more_kv_makes_a_step_longer():
    assert chosen([candidate("a", kv_used_tokens=90_000), candidate("b", kv_used_tokens=10)]) == "b"


def test_an_instance_over_its_high_water_gets_nothing_unless_all_are():
    over = candidate("a", kv_used_tokens=89_500, kv_high_water_tokens=90_000)
    worse = candidate("b", running=60, kv_used_tokens=80_000, kv_high_water_tokens=90_000)

    assert chosen([over, worse]) == "b"
    assert chosen([over, candidate("b", running=60, kv_used_tokens=95_000, kv_high_water_tokens=90_000)]) == "a"


def test_an_instance_that_could_never_hold_the_request_is_left_out():
    small, large = candidate("a", kv_total_tokens=1500), candidate("b", running=50)

    assert chosen([small, large], max_new_tokens=600) == "b"
    refusal = choose_decode([small], prompt_tokens=1000, max_new_tokens=600)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Refused.TOO_LARGE
    assert "1500" in refusal.message


def test_a_slower_engine_is_recognised_by_its_steps():
    slow = candidate("a", running=4, decode_step_seconds=0.5)
    fast = candidate("b", running=8, decode_step_seconds=0.02)

    assert chosen([slow, fast]) == "b"


def test_transfer_is_weighed_against_the_batch():
    pair = [candidate("a", running=2), candidate("b", running=3)]

    assert chosen(pair, transfer_seconds={"a": 3.0, "b": 0.01}) == "b"
    assert chosen(pair, transfer_seconds={"a": 0.01, "b": 0.01}) == "a"


def test_a_full_batch_costs_the_wait_for_a_place():
    full = candidate("a", running=16, queued_requests=16, max_running_requests=16)

    assert chosen([full, candidate("b", running=30, max_running_requests=64)]) == "b"


@pytest.mark.parametrize("age", [None, 60.0])
def test_an_unknown_load_is_not_preferred(age):
    assert chosen([candidate("a", age=age), candidate("b", running=60)]) == "b"
    assert chosen([candidate("a", age=age)]) == "a"


def test_draining_and_excluded_instances_are_left_out():
    draining = candidate("a", state=InstanceState.DRAINING)

    assert chosen([draining, candidate("b", running=9)]) == "b"
    refusal = choose_decode([draining, candidate("b")], prompt_tokens=1, excluded=frozenset({"b"}))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Refused.NONE_SERVING


def test_a_service_without_a_serving_role_is_unavailable():
    prefill = [PrefillCandidate(instance("p"))]

    refusal = admit(prefill, [], in_flight=0)

    assert refusal is not None
    assert refusal.reason is Refused.NONE_SERVING
    assert "decode" in refusal.message
    assert admit(prefill, [candidate("d")], in_flight=0) is None


def test_requests_over_a_bound_are_told_to_come_back():
    prefill, settings = [PrefillCandidate(instance("p"))], AdmissionSettings(max_in_flight=3, max_waiting_per_decode=5)
    waiting, idle = candidate("d", queued_requests=4, requests=2), candidate("e")

    for refusal in (
        admit(prefill, [idle], in_flight=3, settings=settings),
        admit(prefill, [waiting], in_flight=0, settings=settings),
    ):
        assert refusal is not None
        assert refusal.reason is Refused.OVERLOADED
        assert refusal.retry_after_seconds
    assert admit(prefill, [waiting, idle], in_flight=2, settings=settings) is None
