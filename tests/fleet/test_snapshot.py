"""What the substrate sees and what agents tell, joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kllm_core.fleet import EngineLoad, InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Request
from kllm_operator.fleet.snapshot import snapshot
from kllm_operator.fleet.told import Told
from kllm_operator.substrate.base import Observed

SERVING, DRAINING, FAILED, STARTING = (
    InstanceState.SERVING, InstanceState.DRAINING, InstanceState.FAILED, InstanceState.STARTING,
)  # fmt: skip
SEEN = Observed("p0", Role.PREFILL, SERVING, "host:1", "serves", 50.0)
LOAD = EngineLoad(age_seconds=0.5, running_requests=2, queued_requests=1, parked_requests=3)
TOLD = Told(heard_at=100.0, incarnation=7, load=LOAD, flippable=True)


def joined(seen=SEEN, told=TOLD, now=101.0, **changes):
    return snapshot([seen], {} if told is None else {"p0": told}, now=now, **changes)


def member(*arguments, **changes):
    return joined(*arguments, **changes).members[0]


def test_a_load_grows_older_after_it_was_heard():
    instance = joined().fleet.instances["p0"]

    assert instance.load.age_seconds == 1.5
    assert (instance.incarnation, instance.flippable) == (7, True)


def test_what_an_instance_holds_is_all_that_it_has_in_any_stage():
    assert member().in_flight == 6


@pytest.mark.parametrize("told", [None, replace(TOLD, load=None), replace(TOLD, load=replace(LOAD, age_seconds=30.0))])
def test_what_is_not_told_or_old_is_unknown(told):
    assert member(told=told).in_flight is None


def test_a_draining_one_is_empty_only_when_its_agent_said_so():
    """Its load may be a moment older than the last request on its way to it."""
    idle = replace(TOLD, load=EngineLoad(age_seconds=0.0, running_requests=0))
    draining = replace(SEEN, state=DRAINING)

    assert member(draining, idle).in_flight == 1
    assert member(draining, None).in_flight is None
    assert member(replace(draining, drained=True), TOLD).in_flight == 0
    assert member(replace(draining, overdue=True), TOLD).drain_overdue


def test_an_agent_that_gave_its_engine_up_and_one_that_is_silent_have_failed():
    hung = replace(TOLD, failed="it hangs", failed_at=91.5)
    assert member(told=hung).state is SERVING  # it may resume, and else its agent ends it
    assert joined(told=hung, now=102.0).observed[0].message == "it hangs"
    assert member(told=hung, now=102.0).state is FAILED
    assert member(now=119.0).state is SERVING
    silent = joined(now=121.0)
    assert silent.members[0].state is FAILED
    assert silent.observed[0].message == "its agent was silent for 21 s"


def test_silence_is_no_failure_of_one_that_its_node_hears():
    """Else an operator that is cut off from all engines would end all of them."""
    heard = replace(SEEN, vouched=True)
    assert member(heard, now=121.0).state is SERVING
    assert member(heard, replace(TOLD, failed="it hangs", failed_at=91.5), now=102.0).state is FAILED


def test_one_that_starts_or_was_never_heard_is_not_given_up_for_silence():
    assert member(replace(SEEN, state=STARTING), now=500.0).state is STARTING
    assert member(told=None, now=500.0).state is SERVING


def test_one_that_is_being_ended_holds_its_place_and_serves_nobody():
    ended = joined(replace(SEEN, ending=True))

    assert ended.members[0].ending
    assert ended.fleet.instances == {}


def test_a_switch_that_failed_once_is_not_tried_again():
    assert not member(unflippable=frozenset({"p0"})).flippable


def test_a_slot_on_its_way_is_no_capacity_on_its_way():
    seen = joined(replace(SEEN, state=STARTING, slot=True))

    assert seen.fleet.instances["p0"].state is InstanceState.SLOT
    assert seen.members[0].is_idle


def test_one_of_an_old_revision_is_not_flipped():
    assert not joined(replace(SEEN, outdated=True)).fleet.instances["p0"].flippable
    assert member(replace(SEEN, outdated=True)).unwanted


def test_what_a_person_asks_and_whether_it_has_proven_itself_are_told():
    seen = member(replace(SEEN, requested=Request.DRAIN), unproven=frozenset({"p0"}))

    assert (seen.requested, seen.unwanted, seen.proven) == (Request.DRAIN, True, False)
