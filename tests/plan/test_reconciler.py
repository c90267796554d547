"""From (desired, observed) to one safe step, from any state and after every interruption."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import D, P, SmallSubstrate
from plan.situations import (
    DRAINING,
    FAILED,
    GATED,
    SERVING,
    SLOT,
    STARTING,
    assert_converged,
    goal,
    pair,
    promises,
    run,
    situations,
    step,
)  # fmt: skip

from kllm_core.steps import Cancel, DesiredCounts, Drain, Flip, Start, StartFrom, StepDecision, Stop
from kllm_operator.plan.drain_order import drain_order
from kllm_operator.plan.invariants import UnsafeStepError, check
from kllm_operator.plan.members import Goal, Limits, Member, PoolLimits
from kllm_operator.plan.reconciler import next_step


def test_what_is_as_desired_needs_no_step():
    decision = next_step(goal(), pair())

    assert decision == StepDecision(None, "Converged", decision.message)
    assert "prefill has 1 serving and 0 starting, wants 1" in decision.message


def test_the_dead_are_stopped_before_all_else():
    assert step(goal(prefill=3), pair(Member("p1", P, FAILED))) == Stop("p1")


def test_the_newest_start_that_is_not_needed_is_cancelled_before_anything_drains():
    members = pair(Member("p1", P, STARTING, age_seconds=9), Member("p2", P, STARTING, age_seconds=3))

    assert step(goal(prefill=2), members) == Cancel("p2")
    assert step(goal(prefill=1), members[:3]) == Cancel("p1")


def test_a_start_that_is_needed_is_waited_for():
    decision = next_step(goal(prefill=2), pair(Member("p1", P, STARTING)))

    assert (decision.step, decision.reason) == (None, "WaitingForStart")


@pytest.mark.parametrize(
    ("idle", "source"),
    [
        ([], StartFrom.NEW),
        ([Member("s", P, SLOT)], StartFrom.SLOT),
        ([Member("s", D, SLOT)], StartFrom.SLOT),
        ([Member("s", P, SLOT), Member("g", P, GATED)], StartFrom.GATE),
        ([Member("g", D, GATED)], StartFrom.NEW),
    ],
)
def test_a_missing_one_starts_by_the_fastest_way(idle, source):
    assert step(goal(prefill=2), pair(*idle)) == Start(P, source)


def test_the_pool_with_the_smaller_part_of_its_instances_starts_first():
    assert step(goal(prefill=3, decode=3), [Member("p0", P, SERVING)]) == Start(D)


def test_draining_instances_hold_their_accelerators():
    draining = Member("d1", D, DRAINING, in_flight=4)
    decision = next_step(goal(prefill=2, budget=3), pair(draining))

    assert (decision.step, decision.reason) == (None, "WaitingForDrain")
    assert "3 accelerators held, of 3" in decision.message


def test_with_the_budget_used_up_the_surplus_drains_before_the_missing_one_starts():
    small = SmallSubstrate([*pair(), Member("d1", D, SERVING, in_flight=5)])
    wanted, taken = goal(prefill=2, budget=3), []
    while (decision := next_step(wanted, list(small.members.values()))).step is not None:
        taken.append(type(decision.step))
        small.apply(decision.step)
        small.settle()

    assert taken == [Drain, Stop, Start]


def test_more_than_the_budget_is_not_started():
    assert next_step(goal(prefill=4, budget=2), pair()).reason == "BudgetExhausted"


def test_a_slot_of_another_size_gives_way_to_what_is_missing():
    members = pair(Member("s", D, SLOT))

    assert step(goal(prefill=2, budget=6, gpus=(2, 2)), members) == Start(P, StartFrom.SLOT)
    assert step(goal(prefill=2, budget=5, gpus=(2, 1)), members) == Cancel("s")


def test_a_surplus_drains_fewest_in_flight_first_then_the_youngest():
    members = [
        Member("a", P, SERVING, in_flight=3, age_seconds=1),
        Member("b", P, SERVING, in_flight=1, age_seconds=50),
        Member("c", P, SERVING, in_flight=1, age_seconds=20),
        Member("e", P, SERVING, in_flight=None, age_seconds=1),
    ]

    assert [member.id for member in drain_order(members)] == ["c", "b", "a", "e"]
    assert step(goal(prefill=3), [*members, Member("d0", D, SERVING)]) == Drain("c")


def test_nothing_drains_below_the_minimum_even_if_less_is_desired():
    members = pair(Member("p1", P, SERVING))

    assert step(goal(prefill=0, least=2), [*members, Member("d1", D, SERVING)]) is None


def test_a_drained_one_is_stopped_and_one_with_requests_only_when_it_is_overdue():
    busy = Member("p1", P, DRAINING, in_flight=2)

    assert step(goal(), pair(busy)) is None
    assert step(goal(), pair(Member("p1", P, DRAINING, in_flight=None))) is None
    assert step(goal(), pair(Member("p1", P, DRAINING, in_flight=0))) == Stop("p1")
    assert step(goal(), pair(Member("p1", P, DRAINING, in_flight=2, drain_overdue=True))) == Stop("p1")


def test_a_flip_drains_the_flippable_one_waits_and_flips_and_starts_nothing():
    small = SmallSubstrate(pair(Member("d1", D, SERVING, True, 2), Member("d2", D, SERVING, False, 0)))
    wanted, taken = goal(prefill=2, decode=2, flip_to=P), []
    for _ in range(10):
        decision = next_step(wanted, list(small.members.values()))
        taken.append(decision.step)
        if decision.step is None:
            small.settle()
        else:
            small.apply(decision.step)

    assert [each for each in taken if each is not None] == [Drain("d1", P), Flip("d1", P)]
    assert len(small.serving(P)) == len(small.serving(D)) == 2


def test_an_instance_that_cannot_flip_is_replaced():
    assert step(goal(prefill=2, flip_to=P), pair(Member("d1", D, SERVING, flippable=False))) == Start(P)


def test_a_flip_that_never_becomes_empty_is_stopped_and_a_new_one_starts():
    stuck = Member("d1", D, DRAINING, True, in_flight=3, drain_overdue=True)

    assert step(goal(prefill=2, flip_to=P), pair(stuck)) == Start(P)
    assert step(goal(prefill=2, flip_to=P, budget=3), pair(stuck)) == Stop("d1")


def test_roles_of_different_size_do_not_flip():
    idle = Member("d1", D, SERVING, flippable=True)

    assert step(goal(prefill=2, flip_to=P, gpus=(2, 1)), pair(idle)) == Start(P)


def test_one_that_is_being_ended_gets_no_step_and_holds_its_accelerator():
    failed = Member("p1", P, FAILED, ending=True)
    draining = Member("d1", D, DRAINING, flippable=True, in_flight=0, ending=True)

    assert next_step(goal(), pair(failed, draining)).reason == "WaitingForStop"
    assert next_step(goal(prefill=2, budget=3), pair(failed)).reason == "WaitingForStop"
    assert step(goal(prefill=2, flip_to=P), pair(draining)) == Start(P)


def test_a_role_that_is_held_back_starts_nothing_and_nothing_else_waits_for_it():
    held_back = frozenset({D})
    short = replace(goal(prefill=2, decode=2), held_back=held_back)

    assert step(short, pair()) == Start(P)
    assert next_step(short, pair(Member("p1", P, SERVING))).reason == "StartHeldBack"
    assert step(replace(goal(decode=2), held_back=held_back), pair(Member("p1", P, SERVING))) == Drain("p1")


@pytest.mark.parametrize(
    "bad",
    [Drain("p0"), Drain("gone"), Stop("p0"), Cancel("p0"), Flip("p0", D), Start(P)],
)
def test_an_unsafe_step_is_refused(bad):
    with pytest.raises(UnsafeStepError):
        check(bad, goal(budget=2), pair())


def test_limits_that_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="gpuBudget 3 is below the 4"):
        Limits(PoolLimits(2, 4), PoolLimits(2, 4), 3)


@settings(max_examples=250, deadline=None)
@given(situations())
def test_from_any_state_it_converges_by_safe_steps(situation):
    wanted, members = situation
    small, _ = run(wanted, members, promises)

    assert_converged(wanted, small)


@settings(max_examples=60, deadline=None)
@given(situations(), situations())
def test_every_interrupted_prefix_converges_to_another_goal_too(first, second):
    wanted, members = first
    _, prefixes = run(wanted, members)
    # Sizes of instances belong to what is there, so the other goal keeps them.
    counts = DesiredCounts(*(min(second[0].wanted(r), wanted.wanted(r)) for r in (P, D)), "Other", "another goal")
    other = Goal(counts, wanted.limits, second[0].flip_to)
    for prefix in prefixes:
        for target in (wanted, other):
            small, _ = run(target, prefix, promises)
            assert_converged(target, small)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))
def test_a_demand_is_never_met_by_a_flip_and_a_start(prefill, decode, more, busy):
    """With a flip asked for, at most `more` instances come, however starts, drains and the flip interleave."""
    members = [Member(f"p{n}", P, SERVING, True, busy) for n in range(prefill)]
    members += [Member(f"d{n}", D, SERVING, True, busy) for n in range(decode + 1)]
    wanted = goal(prefill + more, decode, flip_to=P)
    small, came = SmallSubstrate(members), []
    for tick in range(60):
        decision = next_step(wanted, list(small.members.values()))
        if decision.step is not None:
            came += [decision.step] if isinstance(decision.step, Start | Flip) else []
            small.apply(decision.step)
        if tick % 5 == 4:
            small.settle()

    assert len(came) == more
    assert sum(isinstance(each, Flip) for each in came) == min(1, more)
    assert_converged(wanted, small)
