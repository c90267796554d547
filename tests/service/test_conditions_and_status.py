"""Conditions and status as pure functions of what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service.known import BOTH, facts, instance, report
from service.service_world import service

from kllm_core.conditions import ConditionType, Reason
from kllm_core.fleet import InstanceState
from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.loop.crashes import LastFailure, Pause
from kllm_operator.loop.looking import LastStart
from kllm_operator.loop.report import Limited
from kllm_operator.service.conditions import service_conditions
from kllm_operator.service.facts import Routers, Trouble, Verdict
from kllm_operator.service.status import is_told, is_urgent, pool_status, service_status
from kllm_operator.substrate.base import StartPhase

NOW, EARLIER = "2026-01-01T00:00:10Z", "2026-01-01T00:00:00Z"
SERVING = (InstanceState.SERVING, "")


def states(known):
    return {state.type: (state.status.value, state.reason, state.message) for state in service_conditions(known, {})}


def test_a_service_is_ready_when_every_part_is():
    told = states(facts())
    assert told[ConditionType.READY][:2] == ("True", Reason.SERVING)
    assert told[ConditionType.PROGRESSING][0] == told[ConditionType.DEGRADED][0] == "False"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"observed": [instance(Role.PREFILL), instance(Role.DECODE, InstanceState.STARTING)]}, "Starting"),
        (
            {"observed": [instance(Role.PREFILL), instance(Role.DECODE, InstanceState.STARTING, "Unschedulable")]},
            "Unschedulable",
        ),
        (
            {"observed": [instance(Role.PREFILL), instance(Role.DECODE, InstanceState.FAILED, "ModelNotFound")]},
            "ModelNotFound",
        ),
        ({"routers": Routers(desired=2, ready=0, reason="ImagePullFailed", message="no image")}, "ImagePullFailed"),
        ({"routers": Routers(desired=1, ready=1, knows_fleet=False)}, "Starting"),
        ({"verdict": Verdict(False, Reason.INVALID_SPEC, "spec.x: wrong")}, "InvalidSpec"),
    ],
)
def test_what_keeps_it_from_being_ready_is_named(change, reason):
    status, told, message = states(facts(**change))[ConditionType.READY]
    assert (status, told) == ("False", reason)
    assert message


def test_what_is_wrong_is_named_before_what_is_on_its_way():
    known = facts([instance(Role.PREFILL, InstanceState.STARTING), instance(Role.DECODE, InstanceState.STARTING)])
    wrong = replace(known, routers=Routers(desired=1, ready=0, reason="Unschedulable", message="no node"))
    assert states(wrong)[ConditionType.READY][1] == "Unschedulable"


def test_instances_of_an_old_revision_do_not_hide_that_the_new_one_has_no_model():
    old = [instance(role, outdated=True) for role in Role]
    new = instance(Role.DECODE, InstanceState.FAILED, "ModelNotFound", 1)
    told = states(facts([*old, new]))
    assert told[ConditionType.MODEL_AVAILABLE][:2] == ("False", "ModelNotFound")
    assert told[ConditionType.DECODE_READY][0] == "True"
    assert told[ConditionType.READY][0] == "True", "the old ones serve"
    assert told[ConditionType.PROGRESSING][1] == Reason.ROLLING_OUT


def test_a_rollout_that_has_just_begun_takes_nothing_away():
    old = [instance(role, outdated=True) for role in Role]
    told = states(facts([*old, instance(Role.PREFILL, InstanceState.STARTING, number=1)]))
    assert told[ConditionType.READY][0] == "True"
    assert told[ConditionType.MODEL_AVAILABLE][0] == "True"


def test_what_failed_is_told_while_it_is_tried_again():
    starting = [instance(role, InstanceState.STARTING) for role in Role]
    failed = LastFailure("ModelNotFound", "hf://no-such/model does not exist")
    told = states(facts(report=report(starting, pools={"last_failure": failed})))
    for kind in (ConditionType.MODEL_AVAILABLE, ConditionType.PREFILL_READY, ConditionType.READY):
        assert told[kind][:2] == ("False", "ModelNotFound")
        assert "no-such/model" in told[kind][2]
    unknown = states(facts(report=report(starting, pools={"last_failure": LastFailure("", "exit code 2")})))
    assert unknown[ConditionType.PREFILL_READY][:2] == ("False", Reason.INSTANCE_FAILING)
    assert unknown[ConditionType.MODEL_AVAILABLE][1] == Reason.FETCHING
    there = states(facts(report=report(BOTH, pools={"last_failure": failed})))
    assert there[ConditionType.MODEL_AVAILABLE][0] == "True"


def test_a_rollout_that_stopped_says_so_and_why():
    told = states(facts(report=report(BOTH, pools={"stopped": "it breaks"})))
    assert told[ConditionType.PROGRESSING][:2] == ("False", Reason.ROLLOUT_STOPPED)
    assert "it breaks" in told[ConditionType.PROGRESSING][2]


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"trouble": Trouble(Reason.APPLY_FAILED, "quota")}, "ApplyFailed", "quota"),
        (
            {"report": report(BOTH, pools={"held_back": Pause(3, 4.0, "it broke")})},
            "InstanceFailing", "3 failures in a row",
        ),
        (
            {"report": report(BOTH, pools={"last_failure": LastFailure("", "no such argument")})},
            "InstanceFailing", "no such argument",
        ),
        ({"report": report(BOTH, pools={"trouble": "no pod"})}, "InstanceFailing", "no pod"),
        ({"report": report(BOTH, pools={"slots_wanted": 1})}, "SlotsMissing", "2 of the"),
        (
            {"routers": Routers(desired=2, ready=2, knows_fleet=True, unshared="no answer in time")},
            "RoutersApart", "no answer in time",
        ),
    ],
)  # fmt: skip
def test_a_service_that_serves_less_well_than_it_should_is_degraded_and_ready(change, reason, words):
    told = states(facts(**change))
    assert told[ConditionType.DEGRADED][:2] == ("True", reason)
    assert words in told[ConditionType.DEGRADED][2]
    assert told[ConditionType.READY][0] == "True"


def test_what_finds_no_node_limits_scaling_while_others_serve():
    more = instance(Role.DECODE, InstanceState.STARTING, "Unschedulable", number=1)
    told = states(facts([*BOTH, more]))
    assert told[ConditionType.SCALING_LIMITED] == ("True", "Unschedulable", f"{more.id}: Unschedulable")
    assert told[ConditionType.READY][0] == "True"
    assert states(facts())[ConditionType.SCALING_LIMITED][:2] == ("False", "WithinLimits")


def test_bounds_that_others_ran_into_are_told():
    limited = report(BOTH, limited=Limited("ScalingLimited", "9 is above maxReplicas 3"))
    assert states(facts(report=limited))[ConditionType.SCALING_LIMITED][:2] == ("True", Reason.OUT_OF_BOUNDS)


def test_slots_and_what_is_ending_are_no_instances():
    observed = [
        instance(Role.PREFILL), instance(Role.PREFILL, number=1, ending=True),
        instance(Role.PREFILL, InstanceState.SLOT, number=2, slot=True),
        instance(Role.PREFILL, InstanceState.FAILED, number=3), instance(Role.DECODE),
    ]  # fmt: skip
    told = pool_status(facts(observed), Role.PREFILL, {}, generation=2, now=NOW)
    assert {key: told[key] for key in ("replicas", "ready", "slots", "failed", "observedGeneration")} == {
        "replicas": 1, "ready": 1, "slots": 1, "failed": 1, "observedGeneration": 2,
    }  # fmt: skip


def test_times_of_conditions_stay_until_their_status_changes():
    before = service_status(facts(), {}, now=EARLIER)
    away = facts(routers=Routers(desired=1, ready=0))
    after = {each["type"]: each["lastTransitionTime"] for each in service_status(away, before, now=NOW)["conditions"]}
    assert after["Ready"] == after["RouterReady"] == NOW
    assert {after[each] for each in after if each not in {"Ready", "RouterReady"}} == {EARLIER}


def test_before_its_first_look_a_loop_leaves_what_the_last_leader_said():
    before = service_status(facts(), {}, now=EARLIER)
    assert service_status(facts(report=None), before, now=NOW) == before
    pool = pool_status(facts(), Role.DECODE, {}, generation=1, now=EARLIER)
    assert pool_status(facts(report=None), Role.DECODE, pool, generation=1, now=NOW) == pool


def test_conditions_of_others_are_nothing_to_write_about():
    told = service_status(facts(), {}, now=EARLIER)
    foreign = {"type": "Theirs", "status": "True", "reason": "R", "message": "", "lastTransitionTime": EARLIER}
    live = {**told, "conditions": [foreign, *reversed(told["conditions"])]}
    assert is_told(told, live)
    assert not is_told(told, {**live, "left": "over"})


def test_loads_and_words_can_wait_and_counts_cannot():
    live = service_status(facts(), {}, now=EARLIER)
    busier = service_status(facts(report=report(BOTH, value=0.5, reason="LoadUnknown")), live, now=NOW)
    assert not is_told(busier, live)
    assert not is_urgent(busier, live)
    more = service_status(facts(report=report(BOTH, desired=(2, 1))), live, now=NOW)
    assert is_urgent(more, live)


def started(source, seconds, *phases):
    last = LastStart("chat-engine-a", source, seconds, tuple(StartPhase(name, each) for name, each in phases))
    return facts(report=report(BOTH, pools={"last_start": last}))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(started(None, None), id="nothing"),
        pytest.param(started(None, 1.0, ("scheduled", 1.0)), id="not all phases yet"),
        pytest.param(started(None, 3.0, ("scheduled", 1.0), ("engine", 2.0)), id="all phases"),
        pytest.param(started(None, 4.0, ("scheduled", 1.0), ("engine", 2.0), ("warm", 1.0)), id="more phases"),
        pytest.param(started(None, 9.0, ("scheduled", 4.0), ("engine", 5.0)), id="another instance"),
    ],
)
def test_a_new_leader_leaves_what_the_last_one_said_of_the_last_start(found):
    live = service_status(started(StartFrom.NEW, 3.5, ("scheduled", 1.0), ("engine", 2.0)), {}, now=EARLIER)
    assert live["prefill"]["startMilliseconds"] == 3500
    assert is_told(service_status(found, live, now=NOW), live)


def test_a_start_that_this_leader_decided_is_news():
    live = service_status(started(StartFrom.NEW, 3.5, ("scheduled", 1.0), ("engine", 2.0)), {}, now=EARLIER)
    told = service_status(started(StartFrom.SLOT, 0.5, ("engine", 0.4)), live, now=NOW)["prefill"]
    assert told["startMilliseconds"] == 500
    assert told["startPhases"] == [{"name": "engine", "milliseconds": 400}]


def test_small_changes_of_load_are_no_news():
    live = service_status(facts(report=report(BOTH, value=0.501)), {}, now=EARLIER)
    assert is_told(service_status(facts(report=report(BOTH, value=0.499)), live, now=NOW), live)


def asleep(observed=(), **more):
    """A service that has been scaled to zero."""
    document = service()
    for role in Role:
        document["spec"][role.value] = {**document["spec"].get(role.value, {}), "minReplicas": 0}
    document["spec"] |= more.pop("spec", {})
    return facts(observed, report=report(observed, desired=(0, 0)), service=check_service(document), **more)


def test_a_service_at_zero_on_purpose_is_ready_and_says_so():
    told = states(asleep())
    assert told[ConditionType.READY][:2] == ("True", Reason.SCALED_TO_ZERO)
    assert told[ConditionType.PREFILL_READY][:2] == told[ConditionType.DECODE_READY][:2]
    assert told[ConditionType.PROGRESSING][0] == told[ConditionType.DEGRADED][0] == "False"


def test_routers_that_refuse_what_comes_at_zero_do_not_make_it_less_ready():
    refusing = Routers(desired=1, ready=1, knows_fleet=False)
    assert states(asleep(routers=refusing))[ConditionType.READY][:2] == ("True", Reason.SCALED_TO_ZERO)


def test_a_service_that_has_been_woken_is_not_ready_until_instances_serve():
    waking = replace(asleep(), report=report([instance(Role.PREFILL, InstanceState.STARTING)], desired=(1, 1)))
    assert states(waking)[ConditionType.READY][:2] == ("False", "Starting")


@pytest.mark.parametrize("change", [{"spec": {"scaling": "External"}}, {"paused": True}])
def test_at_zero_where_nobody_would_wake_it_a_service_is_not_ready(change):
    assert states(asleep(**change))[ConditionType.READY][:2] == ("False", Reason.SCALED_TO_ZERO)


def test_at_zero_without_a_router_a_service_is_not_ready():
    gone = Routers(desired=1, ready=0, reason="ImagePullFailed", message="no image")
    assert states(asleep(routers=gone))[ConditionType.READY][:2] == ("False", "ImagePullFailed")


def test_at_zero_a_model_that_is_known_to_be_missing_is_told():
    lost = {"last_failure": LastFailure("ModelNotFound", "there is no such model")}
    known = replace(asleep(), report=report([], desired=(0, 0), pools=lost))
    assert states(known)[ConditionType.READY][:2] == ("False", "ModelNotFound")
