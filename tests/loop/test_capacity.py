"""What changes of capacity took, and when they were."""

from dataclasses import replace

import pytest
from plan.plan_helpers import IDLE, TIMING, D, P, fleet, traffic

from kllm_core.steps import StartFrom
from kllm_operator.loop.capacity import Arrival, CapacityBook

START = {"forecast": traffic(1.0), "timing": TIMING, "fleet": fleet()}


def test_what_serves_first_is_no_change():
    book = CapacityBook()
    assert book.observe(fleet(), now=10.0) == []
    assert book.changed_age_seconds(P, now=20.0) is None


def test_a_change_of_one_role_is_none_of_the_other():
    book = CapacityBook()
    book.observe(fleet(), now=0.0)
    book.decided("prefill-1", P, "Start", at=3.0)
    assert book.observe(fleet(prefill=2), now=10.0) == [Arrival("prefill-1", P, "Start", 7.0, StartFrom.NEW)]
    assert book.changed_age_seconds(P, now=15.0) == 5.0
    assert book.changed_age_seconds(D, now=15.0) is None
    book.observe(fleet(), now=20.0)
    assert book.changed_age_seconds(P, now=21.0) == 1.0


def test_starts_are_the_mean_of_the_last_three_and_what_was_known_before():
    book = CapacityBook(prior_start_seconds=30.0)
    assert book.start_seconds() == 30.0
    book.observe(fleet(), now=0.0)
    for number, seconds in enumerate([100.0, 1.0, 2.0, 3.0], start=1):
        book.decided(f"prefill-{number}", P, "Start", at=0.0)
        book.observe(fleet(prefill=number + 1), now=seconds)
    assert book.start_seconds() == 2.0


def test_flips_are_no_starts_and_forgotten_ones_have_no_time():
    book = CapacityBook()
    book.observe(fleet(), now=0.0)
    book.decided("prefill-1", P, "Flip", at=0.0)
    assert book.observe(fleet(prefill=2), now=4.0)[0].how == "Flip"
    assert book.start_seconds() is None
    book.decided("prefill-2", P, "Start", at=0.0)
    book.forget("prefill-2")
    assert book.observe(fleet(prefill=3), now=4.0) == [Arrival("prefill-2", P, "Start", None)]


def test_what_was_not_measured_is_foreseen_from_the_requests():
    times = CapacityBook(5.0).times(D, **START | {"forecast": traffic(1.0, output=100.0)})

    assert times.drain_seconds == pytest.approx(0.5 + 100 * TIMING.decode.seconds(1, 1000))
    assert times.switch_seconds > 0
    assert times.flip_is_cheaper
    assert not CapacityBook().times(D, **START).flip_is_cheaper


def test_measured_drains_and_switches_count():
    book = CapacityBook(5.0)
    book.drained(D, 9.0)
    book.switched(6.0)
    times = book.times(D, **START)

    assert (times.drain_seconds, times.switch_seconds) == (9.0, 6.0)
    assert not times.flip_is_cheaper


def test_a_prefix_cache_that_is_hit_costs_its_donor_dear():
    warm = fleet(p_load=replace(IDLE, kv_evictable_tokens=200_000))
    hits = replace(traffic(2.0), cached_tokens=1000.0)
    book = CapacityBook(5.0)

    assert book.times(P, forecast=hits, timing=TIMING, fleet=warm).lost_cache_seconds == pytest.approx(12.0)
    assert book.times(P, forecast=traffic(2.0), timing=TIMING, fleet=warm).lost_cache_seconds == 0.0
    assert book.times(P, forecast=hits, timing=TIMING, fleet=fleet()).lost_cache_seconds == 0.0
    assert book.times(D, forecast=hits, timing=TIMING, fleet=warm).lost_cache_seconds == 0.0


def test_starts_from_slots_have_times_of_their_own():
    book = CapacityBook(prior_start_seconds=30.0)
    assert book.start_seconds(StartFrom.SLOT) == 30.0
    book.observe(fleet(), now=0.0)
    book.decided("prefill-1", P, "Start", at=0.0, source=StartFrom.SLOT)
    book.observe(fleet(prefill=2), now=2.0)

    assert (book.start_seconds(StartFrom.SLOT), book.start_seconds()) == (2.0, 30.0)
    assert book.times(D, source=StartFrom.SLOT, **START).start_seconds == 2.0
