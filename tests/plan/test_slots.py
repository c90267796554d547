"""Slots are kept ready beside the instances, and give way to them."""

import pytest
from plan.plan_helpers import D, P, SmallSubstrate
from plan.situations import SERVING, SLOT, STARTING, goal, pair, run, step

from kllm_core.steps import Cancel, Prepare, Start, StartFrom
from kllm_operator.plan.invariants import UnsafeStepError, check
from kllm_operator.plan.members import Member
from kllm_operator.plan.reconciler import next_step


def preparing(name, role=P, **kwargs):
    return Member(name, role, STARTING, slot=True, **kwargs)


def test_slots_are_prepared_up_to_their_number():
    wanted = goal(slots=(1, 2))
    small, _ = run(wanted, pair())

    assert sorted(m.role for m in small.members.values() if m.state is SLOT) == [D, D, P]
    assert (
        next_step(wanted, pair(preparing("s"), Member("t", D, SLOT), Member("u", D, SLOT))).reason == "WaitingForSlot"
    )


def test_a_slot_on_its_way_counts_as_no_instance():
    assert step(goal(prefill=2, slots=(1, 0)), pair(preparing("s"))) == Start(P)
    assert step(goal(slots=(1, 0)), pair(preparing("s"))) is None


def test_after_a_slot_was_taken_a_new_one_is_prepared():
    small, taken = SmallSubstrate(pair(Member("s", P, SLOT))), []
    wanted = goal(decode=2, slots=(1, 0))
    while (decision := next_step(wanted, list(small.members.values()))).step is not None:
        taken.append(decision.step)
        small.apply(decision.step)

    assert taken == [Start(D, StartFrom.SLOT), Prepare(P)]


def test_slots_of_pods_that_differ_serve_their_own_role_only():
    wanted = goal(decode=2, slots=(1, 0), interchangeable=False)

    assert step(wanted, pair(Member("s", P, SLOT))) == Start(D)


def test_surplus_slots_go_unready_and_young_first():
    slots = [Member("a", P, SLOT, age_seconds=9), Member("b", P, SLOT, age_seconds=5)]

    assert step(goal(slots=(1, 0)), pair(*slots)) == Cancel("b")
    assert step(goal(slots=(2, 0)), pair(*slots, preparing("c", age_seconds=99))) == Cancel("c")


def test_slots_are_accelerators_and_the_first_to_give_them_up():
    wanted = goal(budget=3, slots=(2, 0))

    assert step(wanted, pair()) == Prepare(P)
    assert next_step(wanted, pair(Member("s", P, SLOT))).reason == "NoRoomForSlots"
    assert step(goal(decode=2, budget=3, slots=(1, 0), interchangeable=False), pair(Member("s", P, SLOT))) == Cancel(
        "s"
    )
    assert step(goal(decode=2, budget=3, slots=(1, 0)), pair(preparing("s"))) == Cancel("s")


def test_nothing_is_prepared_where_instances_are_still_to_come():
    members = pair(Member("p1", P, STARTING))

    assert step(goal(prefill=3, decode=1, budget=4, slots=(0, 1)), members) == Start(P)
    full = [*members, Member("d1", D, SERVING)]
    assert step(goal(prefill=3, decode=1, budget=4, slots=(0, 1)), full[:3]) == Start(P)
    assert not isinstance(step(goal(prefill=4, decode=1, budget=5, slots=(0, 1)), full), Prepare)


@pytest.mark.parametrize("slots", [(0, 0), (1, 0)])
def test_a_slot_above_its_number_or_the_budget_is_refused(slots):
    with pytest.raises(UnsafeStepError):
        check(Prepare(P), goal(budget=2, slots=slots), pair())
