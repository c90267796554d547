"""Counts from outside, and flips that people ask for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_helpers import D, P, limits
from plan.situations import DRAINING, SERVING, STARTING

from kllm_core.steps import DesiredCounts, Request
from kllm_operator.plan.bounds import bounded
from kllm_operator.plan.members import Member
from kllm_operator.plan.requests import asked_flips


def test_counts_from_outside_are_taken_as_they_are_within_the_limits():
    counts = bounded({P: 3, D: 2}, limits(), there={P: 1, D: 1})

    assert (counts.prefill, counts.decode, counts.reason) == (3, 2, "External")


@pytest.mark.parametrize(
    ("asked", "got", "why"),
    [
        ({P: 9, D: 1}, (4, 1), "prefill is asked for 9 and gets 4: maxReplicas is 4"),
        ({P: 0, D: 2}, (1, 2), "prefill is asked for 0 and gets 1: minReplicas is 1"),
        ({P: 4, D: 4}, (3, 2), "decode is asked for 4 and gets 2: gpuBudget is 5"),
    ],
)
def test_counts_out_of_bounds_are_clamped_and_told(asked, got, why):
    counts = bounded(asked, limits(budget=5, most=4), there={P: 1, D: 2})

    assert (counts.prefill, counts.decode) == got
    assert counts.reason == "ScalingLimited"
    assert why in counts.message


def test_with_nobody_asking_what_is_there_stays():
    counts = bounded({D: 2}, limits(), there={P: 4, D: 4})

    assert (counts.prefill, counts.decode, counts.reason) == (4, 2, "External")
    assert bounded({}, limits(), there={}).prefill == 1


def test_what_is_there_is_not_taken_away_for_what_is_asked_for():
    counts = bounded({P: 9, D: 3}, limits(budget=6), there={P: 1, D: 3})

    assert (counts.prefill, counts.decode) == (3, 3)


counted = st.integers(0, 9)


@given(counted, counted, counted, counted, st.integers(2, 12), st.sampled_from([(1, 1), (2, 1), (1, 3)]))
def test_bounded_counts_fit_and_rest_once_they_are_there(prefill, decode, has_prefill, has_decode, more, gpus):
    bounds = limits(budget=sum(gpus) + more, most=7, gpus=gpus)
    asked, there = {P: prefill, D: decode}, {P: has_prefill, D: has_decode}
    counts = bounded(asked, bounds, there=there)

    assert bounds.fits(bounds.gpus(counts.prefill, counts.decode))
    assert all(1 <= counts.of(role) <= 7 for role in (P, D))
    assert all(counts.of(role) <= max(1, asked[role]) for role in (P, D))
    assert bounded(asked, bounds, there={P: counts.prefill, D: counts.decode}) == counts


DESIRED = DesiredCounts(1, 2, "Steady", "loads are low")


def flips(members, desired=DESIRED, flip_to=None, external=False, **kwargs):
    return asked_flips(desired, flip_to, members, limits(**kwargs), external=external)


def asking(name="d1", role=D, state=SERVING, **kwargs):
    return Member(name, role, state, **({"flippable": True, "requested": Request.FLIP} | kwargs))


def fleet(*more):
    return [Member("p0", P, SERVING, True), Member("d0", D, SERVING, True), *more]


def test_a_flip_shifts_both_counts_in_one_decision():
    flip = flips(fleet(asking()))

    assert (flip.desired.prefill, flip.desired.decode, flip.flip_to) == (2, 1, P)
    assert (flip.desired.reason, flip.granted) == ("FlipRequested", "d1")


def test_counts_are_shifted_once_until_it_is_done():
    shifted = flips(fleet(asking())).desired

    for state in (SERVING, DRAINING):
        again = flips(fleet(asking(state=state)), shifted)
        assert (again.desired.prefill, again.desired.decode, again.flip_to) == (2, 1, P)


@pytest.mark.parametrize(
    ("member", "change", "why"),
    [
        (asking(), {"external": True}, "scaling is External"),
        (asking(), {"gpus": (2, 1)}, "differ in their accelerators"),
        (asking(), {"interchangeable": False}, "pod templates"),
        (asking(), {"least": 2}, "decode would have 1 instances, and needs 2"),
        (asking(), {"most": 1}, "prefill would have 2 instances, and maxReplicas is 1"),
        (asking(flippable=False), {}, "cannot switch roles"),
        (asking(outdated=True), {}, "old revision"),
        (asking(state=STARTING), {}, "only what serves"),
    ],
)
def test_a_flip_that_is_not_possible_is_refused_with_the_reason(member, change, why):
    flip = flips(fleet(member), **change)

    assert flip.desired == DESIRED
    assert why in flip.refused["d1"]


def test_one_flip_at_a_time():
    members = fleet(asking("d1"), asking("d2"))

    assert flips(members, DesiredCounts(1, 3, "Steady", "")).waiting == {"d2": "another instance flips"}
    assert flips(members, flip_to=D).waiting.keys() == {"d1", "d2"}
    assert flips(fleet(asking(), Member("p1", P, STARTING))).waiting == {"d1": "prefill has 2 instances and wants 1"}
