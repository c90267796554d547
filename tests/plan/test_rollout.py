"""Instances of an old revision, and those that a person wants gone, are replaced while the service goes on."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import D, P, SmallSubstrate
from plan.situations import (
    DRAINING,
    FAILED,
    SERVING,
    SLOT,
    STARTING,
    assert_converged,
    coming,
    goal,
    pair,
    promises,
    run,
    serves,
    step,
)  # fmt: skip

from kllm_core.steps import Cancel, Drain, Request, Start, StartFrom, Stop
from kllm_operator.plan.members import Member
from kllm_operator.plan.reconciler import next_step


def old(name, role, state=SERVING, **kwargs):
    return Member(name, role, state, outdated=True, age_seconds=100, **kwargs)


def rolling(prefill, decode, **kwargs):
    """Both pools as they are wanted, all of an old revision."""
    members = [old(f"p{n}", P) for n in range(prefill)] + [old(f"d{n}", D) for n in range(decode)]
    return goal(prefill, decode, **kwargs), members


def told(wanted, members):
    """Every step until rest, as (kind, role)."""
    taken = []

    def note(_goal, decision, before, after):
        role = getattr(decision.step, "role", None)
        role = role or next(m.role for m in before if m.id == decision.step.instance_id)
        taken.append((type(decision.step), role))
        promises(wanted, decision, before, after)

    small, _ = run(wanted, members, note)
    return taken, small


def test_a_new_one_comes_first_and_the_roles_take_turns():
    wanted, members = rolling(2, 2, budget=5)
    taken, small = told(wanted, members)

    assert taken == [(kind, role) for role in (P, D, P, D) for kind in (Start, Drain, Stop)]
    assert not any(m.outdated for m in small.members.values())
    assert_converged(wanted, small)


def test_a_change_of_one_role_replaces_that_role_only():
    wanted, members = rolling(2, 2)
    members = [replace(m, outdated=m.role is D) for m in members]
    taken, _ = told(wanted, members)

    assert {role for _, role in taken} == {D}
    assert len(taken) == 6


def test_the_old_one_goes_only_when_the_new_one_has_proven_itself():
    members = [old("p0", P), Member("n", P, SERVING, proven=False), Member("d0", D, SERVING)]

    decision = next_step(goal(), members)
    assert (decision.step, decision.reason) == (None, "WaitingForProof")
    assert step(goal(), [members[0], replace(members[1], proven=True), members[2]]) == Drain("p0")


def test_until_one_has_proven_itself_there_is_one_of_the_new_revision():
    members = [old("p0", P), Member("n", P, STARTING), Member("d0", D, SERVING)]

    assert step(goal(prefill=4), members[:1] + members[2:]) == Start(P)
    assert step(goal(prefill=4), members) is None
    assert step(goal(prefill=4), [members[0], Member("n", P, SERVING), members[2]]) == Start(P)


def test_what_starts_of_an_old_revision_is_given_up():
    assert step(goal(prefill=2), pair(old("p1", P, STARTING))) == Cancel("p1")


def test_a_budget_without_room_drains_first_above_the_minimum_only():
    wanted, members = rolling(2, 2, budget=4)
    taken, small = told(wanted, members)

    assert taken == [(kind, role) for role in (P, D, P, D) for kind in (Drain, Stop, Start)]
    assert_converged(wanted, small)
    tight, members = rolling(1, 1, budget=2)
    assert next_step(tight, members).reason == "BudgetExhausted"
    assert step(replace(tight, limits=replace(tight.limits, max_unavailable=1)), members) == Drain("p0")


def test_one_at_a_time_drains_for_a_budget_without_room():
    wanted, members = rolling(3, 3, budget=6)

    assert step(wanted, [replace(members[0], state=DRAINING), *members[1:]]) is None


def test_a_revision_that_fails_is_not_tried_further_and_the_old_one_serves_on():
    wanted, members = rolling(2, 1)
    failing = replace(wanted, failing={P: "has no such image"})
    decision = next_step(failing, members)

    assert (decision.step, decision.reason) == (None, "RolloutStopped")
    assert decision.message.endswith("the new revision of prefill has no such image")
    assert step(failing, [Member("n", P, FAILED), *members]) == Stop("n")
    assert next_step(replace(goal(3, 1), failing={P: "x"}), members).reason == "RolloutStopped"
    assert step(goal(3, 1), members) == Start(P)


def test_a_revision_that_fails_is_tried_on_where_too_few_serve():
    failing = {P: "no such image"}

    assert step(replace(goal(2, 1), failing=failing), [Member("d0", D, SERVING)]) == Start(P)
    assert step(replace(goal(2, 1, least=2), failing=failing), [old("p0", P), *pair()[1:]]) == Start(P)


def test_a_role_waits_for_the_other_whose_revision_fails():
    wanted, members = rolling(1, 1)

    assert step(replace(wanted, failing={P: "x"}), members) is None
    assert step(replace(wanted, held_back=frozenset({P})), members) is None
    half = [Member("n", P, SERVING), *members[1:]]
    assert step(replace(wanted, failing={P: "x"}), half) == Start(D)


def test_outdated_slots_are_replaced_first_and_a_new_one_takes_part():
    wanted, members = rolling(1, 1, budget=4, slots=(1, 0))
    taken, small = told(wanted, [*members, old("s", P, SLOT)])

    assert taken[0] == (Cancel, P)
    assert_converged(wanted, small)
    assert not any(m.outdated for m in small.members.values())
    fresh = [*members, Member("s", P, SLOT)]
    assert step(wanted, fresh) == Start(P, StartFrom.SLOT)


def test_an_old_one_does_not_flip():
    members = [*pair(), Member("d1", D, SERVING, True, outdated=True)]

    assert step(goal(prefill=2, flip_to=P), members) == Start(P)


def test_who_a_person_wants_gone_is_replaced_first_and_then_drained():
    asked = [*pair(Member("p1", P, SERVING, requested=Request.DRAIN))]
    taken, small = told(goal(prefill=2, budget=4), asked)

    assert taken == [(Start, P), (Drain, P), (Stop, P)]
    assert "p1" not in small.members
    assert step(goal(prefill=1), asked) == Drain("p1")
    assert next_step(goal(prefill=2, least=2, budget=4), [*asked, Member("d1", D, SERVING)]).reason == "BudgetExhausted"
    assert step(goal(prefill=2, budget=3), asked) == Drain("p1")
    assert step(goal(), pair(Member("s", P, SLOT, requested=Request.DRAIN))) == Cancel("s")


def test_who_a_person_wants_flipped_flips_first():
    members = [Member("d1", D, SERVING, True, 0), Member("d2", D, SERVING, True, 9, requested=Request.FLIP)]

    assert step(goal(prefill=2, flip_to=P), pair(*members[:1])) == Drain("d1", P)
    assert step(goal(prefill=2, decode=2, flip_to=P), pair(*members)) == Drain("d2", P)


rollouts = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(rollouts)
def test_no_role_is_ever_below_its_count_with_room_for_one_more(sizes):
    prefill, decode, more, *slots = sizes
    wanted, members = rolling(prefill, decode, budget=prefill + decode + 1 + more, slots=slots)
    small, prefixes = run(wanted, members, promises)

    assert_converged(wanted, small)
    assert not any(m.outdated for m in small.members.values())
    for prefix in prefixes:
        assert len(serves(P, prefix)) >= prefill
        assert len(serves(D, prefix)) >= decode
        replaced = [sum(not m.outdated for m in coming(role, prefix)) for role in (P, D)]
        assert abs(replaced[0] / prefill - replaced[1] / decode) <= max(1 / prefill, 1 / decode) + 1e-9
        assert len(prefix) <= prefill + decode + 1 + more


@settings(max_examples=25, deadline=None)
@given(rollouts, st.integers(0, 3), st.integers(0, 3))
def test_a_rollout_that_is_interrupted_ends_with_other_counts_too(sizes, other_prefill, other_decode):
    prefill, decode, more, *slots = sizes
    wanted, members = rolling(prefill, decode, budget=prefill + decode + 1 + more, slots=slots)
    _, prefixes = run(wanted, members)
    other = goal(
        min(prefill + decode - 1, other_prefill + 1), 1, budget=wanted.limits.gpu_budget, slots=slots,
        flip_to=P if other_decode else None,
    )  # fmt: skip
    for prefix in prefixes:
        for outdated_again in (False, True):
            seen = [replace(m, outdated=True) for m in prefix] if outdated_again else prefix
            small, _ = run(other, seen, promises)
            assert_converged(other, small)
            assert not any(m.outdated for m in small.members.values())


@pytest.mark.parametrize("budget", [4, 5, 9])
def test_a_bad_revision_costs_one_instance_at_a_time_and_never_what_serves(budget):
    wanted, members = rolling(2, 2, budget=budget)
    small = SmallSubstrate(members, bad=True)
    failures, seen = 0, []
    for _ in range(60):
        failing = {P: "it fails"} if failures >= 3 else {}
        decision = next_step(replace(wanted, failing=failing), list(small.members.values()))
        if decision.step is None:
            failures += sum(m.state is STARTING for m in small.members.values())
            small.settle()
        else:
            small.apply(decision.step)
        seen.append(list(small.members.values()))

    assert decision.reason == "RolloutStopped"
    assert failures == 3
    assert all(len(serves(P, each)) >= (1 if budget == 4 else 2) for each in seen)
    assert all(len(serves(D, each)) == 2 for each in seen)
    assert all(sum(not m.outdated for m in each) <= 1 for each in seen)
    assert all(len(after) - len(before) <= 1 for before, after in pairwise(seen))
