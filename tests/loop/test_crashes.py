"""When what failed may start again."""

from hypothesis import given
from hypothesis import strategies as st

from kllm_core.objectives import Role
from kllm_operator.loop.crashes import Crashes, LastFailure

P, D = Role.PREFILL, Role.DECODE


def test_pauses_double_up_to_the_longest():
    crashes, now, pauses = Crashes(), 0.0, []
    for _ in range(10):
        pauses.append(crashes.failed(P, now=now, served_seconds=5.0).seconds)
        now += pauses[-1] + 2
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_only_the_role_that_fails_is_held_back_and_only_for_its_pause():
    crashes = Crashes()
    crashes.failed(D, now=0.0, served_seconds=0.0)
    assert crashes.held_back(0.0) == {}
    crashes.failed(D, now=1.0, served_seconds=0.0)
    assert crashes.held_back(1.5).keys() == {D}
    assert crashes.next_seconds(1.5) == 0.5
    assert crashes.held_back(2.0) == {}
    assert crashes.next_seconds(2.0) is None


def test_one_that_had_served_for_a_while_is_a_first_failure_and_one_that_had_not_is_another():
    crashes = Crashes()
    for now in (0.0, 1.0, 3.0):
        crashes.failed(P, now=now, served_seconds=0.0)
    assert crashes.failed(P, now=500.0, served_seconds=59.0).failures == 4
    assert crashes.failed(P, now=600.0, served_seconds=60.0).words == "is replaced at once"


def test_a_failure_after_a_long_service_does_not_wait_for_the_pause_of_another_one():
    crashes = Crashes()
    for _ in range(8):
        crashes.failed(D, now=0.0, served_seconds=0.0)
    assert crashes.held_back(1.0).keys() == {D}
    assert crashes.failed(D, now=1.0, served_seconds=90.0).words == "is replaced at once"
    assert crashes.held_back(1.0) == {}


@given(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=80))
def test_however_often_it_fails_starts_are_rare_and_never_out_of_reach(gaps):
    crashes, now = Crashes(), 0.0
    for gap in gaps:
        now += gap
        pause = crashes.failed(P, now=now, served_seconds=gap)
        assert 0 <= pause.seconds <= 60.001
        assert crashes.held_back(now + 60.001) == {}


def test_failures_count_for_the_revision_that_starts_make():
    crashes = Crashes()
    crashes.expect(P, "a")
    for _ in range(3):
        crashes.failed(P, now=0.0, served_seconds=0.0, message="has no such image")
    crashes.expect(P, "a")
    assert crashes.failing == {P: "has no such image"}
    assert crashes.held_back(0.5)[P].message == "has no such image"
    crashes.expect(P, "b")
    assert crashes.failing == {}
    assert crashes.held_back(0.5) == {}


def test_who_has_seen_to_it_makes_failures_forgotten():
    crashes = Crashes()
    for _ in range(3):
        crashes.failed(P, now=0.0, served_seconds=0.0)
    crashes.forget()
    assert (crashes.failing, crashes.next_seconds(0.0)) == ({}, None)


def test_the_last_failure_stands_until_one_of_that_revision_serves():
    crashes = Crashes()
    crashes.expect(P, "a")
    crashes.failed(P, now=0.0, served_seconds=0.0, message="is not there", reason="ModelNotFound")
    assert crashes.last == {P: LastFailure("ModelNotFound", "is not there")}
    assert crashes.held_back(500.0) == {}
    assert crashes.last.keys() == {P}, "a pause that is over changes nothing"
    crashes.serves(P)
    assert crashes.last == {}
    crashes.failed(P, now=600.0, served_seconds=0.0, message="broke")
    crashes.expect(P, "b")
    assert crashes.last == {}
