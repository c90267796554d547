from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kllm_router.scheduling.ejection import EjectionSettings, Outliers

SETTINGS = EjectionSettings(streak=3, window=10, least=6, share=0.5, base_seconds=5, most_seconds=40, jitter=0.2)
POOL = ["a", "b", "c", "d"]


def outliers(draw: float = 0.0) -> Outliers:
    return Outliers(SETTINGS, lambda: draw)


def test_failures_in_a_row_eject_and_a_pass_between_them_does_not():
    o = outliers()
    assert [o.failed("a", 0.0) for _ in range(2)] == [None, None]
    o.passed("a")
    assert [o.failed("a", 0.0) for _ in range(2)] == [None, None]
    ejection = o.failed("a", 1.0)
    assert ejection is not None
    assert (ejection.reason, ejection.until) == ("FailureStreak", 6.0)
    assert o.left_out(POOL, 5.9) == {"a"}
    assert o.left_out(POOL, 6.0) == frozenset()


def test_a_share_of_failures_ejects_although_no_streak_does():
    o = outliers()
    told = []
    for _ in range(4):
        told.append(o.failed("a", 0.0))
        o.passed("a")
    assert [ejection.reason for ejection in told if ejection] == ["FailureShare"]


def test_each_ejection_is_longer_up_to_a_bound_and_chance_spreads_them():
    o = outliers(draw=0.5)
    now, lengths = 0.0, []
    for _ in range(6):
        ejection = None
        while ejection is None:
            ejection = o.failed("a", now)
        lengths.append(ejection.until - now)
        now = ejection.until
    assert [round(length, 6) for length in lengths] == [5.5, 11.0, 22.0, 44.0, 44.0, 44.0]


def test_after_its_return_one_failure_is_enough_and_a_pass_heals():
    o = outliers()
    for _ in range(3):
        o.failed("a", 0.0)
    assert o.failed("a", 5.0) is not None
    o.passed("a")
    assert o.until("a", 5.0) is None
    assert [o.failed("a", 30.0) for _ in range(2)] == [None, None]


def test_what_fails_during_an_ejection_does_not_lengthen_it():
    o = outliers()
    for _ in range(3):
        o.failed("a", 0.0)
    assert [o.failed("a", 1.0) for _ in range(9)] == [None] * 9
    assert o.until("a", 1.0) == 5.0


def test_an_instance_that_is_another_process_now_starts_anew():
    o = outliers()
    for _ in range(3):
        o.failed("a", 0.0)
    o.forget("a")
    assert o.until("a", 1.0) is None
    assert o.failed("a", 1.0) is None


@given(
    st.lists(st.tuples(st.sampled_from(POOL), st.booleans(), st.floats(0, 3)), max_size=120),
    st.sets(st.sampled_from(POOL), min_size=1),
)
def test_never_more_than_half_of_a_pool_is_out_and_one_always_stays(steps, pool):
    o, now = outliers(draw=1.0), 0.0
    for instance, passed, pause in steps:
        now += pause
        if passed:
            o.passed(instance)
        else:
            o.failed(instance, now)
        out = o.left_out(pool, now)
        assert out <= pool
        assert len(out) <= len(pool) / 2
        assert len(out) < len(pool)
