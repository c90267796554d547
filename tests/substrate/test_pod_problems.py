"""What a pod's status says of its instance, in words that a person can act on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_core import labels
from kllm_core.conditions import Reason
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import Request
from kllm_operator.substrate.kubernetes_agents import Word
from kllm_operator.substrate.kubernetes_pods import read_pod, seconds_of, time_of
from kllm_operator.substrate.kubernetes_problems import problem_of
from kllm_operator.substrate.kubernetes_states import Asked, PodTimeouts, Seen, observed

CREATED = "2026-11-30T10:00:00Z"
STARTED = "2026-11-30T10:00:09Z"
NOW = seconds_of("2026-11-30T10:01:00Z")
S = InstanceState


def container(name="engine", **state):
    return {"name": name, "image": "example.test/engine:1", "state": state}


def running(name="engine"):
    return container(name, running={"startedAt": STARTED})


def terminated(name="engine", **ended):
    return container(name, terminated=ended)


def waiting(reason, message="", name="engine"):
    return container(name, waiting={"reason": reason, "message": message})


def condition(kind, status="True", at=CREATED, **rest):
    return {"type": kind, "status": status, "lastTransitionTime": at, **rest}


UNPLACED = {"phase": "Pending", "conditions": [condition(
    "PodScheduled", "False", reason="Unschedulable", message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
)]}  # fmt: skip
CASES = {
    "no node": (UNPLACED, Reason.UNSCHEDULABLE, "no node takes its pod: 0/2 nodes are available", False),
    "no claim": (
        {"conditions": [condition("PodScheduled", "False", message='persistentvolumeclaim "w" not found')]},
        Reason.CLAIM_NOT_FOUND, 'persistentvolumeclaim "w" not found', False,
    ),
    "unbound claim": (
        {"conditions": [condition("PodScheduled", "False", message="unbound immediate PersistentVolumeClaims")]},
        Reason.CLAIM_NOT_BOUND, "unbound", False,
    ),
    "image": (
        {"phase": "Pending", "containerStatuses": [waiting("ImagePullBackOff", "manifest unknown")]},
        Reason.IMAGE_PULL_FAILED, "example.test/engine:1 cannot be pulled: manifest unknown", False,
    ),
    "image of the init container": (
        {"phase": "Pending", "initContainerStatuses": [waiting("ErrImageNeverPull", name="model")]},
        Reason.IMAGE_PULL_FAILED, "cannot be pulled: ErrImageNeverPull", False,
    ),
    "configuration": (
        {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "chat-fleet-token" not found')]},
        Reason.INSTANCE_FAILING, 'CreateContainerConfigError: secret "chat-fleet-token" not found', False,
    ),
    "model": (
        {"phase": "Failed", "initContainerStatuses": [
            terminated("model", exitCode=3, reason="Error", message="ModelNotFound: no org/name on the hub\n")],
         "containerStatuses": [waiting("PodInitializing")]},
        Reason.MODEL_NOT_FOUND, "the model cannot be had: ModelNotFound: no org/name on the hub", True,
    ),
    "gated model": (
        {"initContainerStatuses": [terminated("model", exitCode=3, message="ModelAccessDenied: ask for access")]},
        Reason.MODEL_ACCESS_DENIED, "ModelAccessDenied: ask for access", True,
    ),
    "hub": (
        {"initContainerStatuses": [terminated("model", exitCode=4, message="HubUnreachable: no route")]},
        Reason.HUB_UNREACHABLE, "no route", True,
    ),
    "a long story": (
        {"initContainerStatuses": [terminated("model", exitCode=6, message="ModelUnusable: it lacks " + "x, " * 300)]},
        Reason.MODEL_UNUSABLE, "x, x", True,
    ),
    "another init container": (
        {"phase": "Failed", "initContainerStatuses": [terminated("fetch", exitCode=2, message="no disk")]},
        Reason.INSTANCE_FAILING, "ended with exit status 2: no disk", True,
    ),
    "memory": (
        {"phase": "Failed", "containerStatuses": [terminated(exitCode=137, reason="OOMKilled")]},
        Reason.INSTANCE_FAILING, "engine was killed for lack of memory (OOMKilled): raise its limit", True,
    ),
    "signal": (
        {"phase": "Failed", "containerStatuses": [terminated(exitCode=137, reason="Error")]},
        Reason.INSTANCE_FAILING, "its engine was ended by SIGKILL", True,
    ),
    "last words": (
        {"phase": "Failed", "containerStatuses": [terminated(exitCode=1, reason="Error", message="out of luck")]},
        Reason.INSTANCE_FAILING, "ended with exit status 1: out of luck", True,
    ),
    "engine beside a container that runs on": (
        {"phase": "Running", "containerStatuses": [running("exporter"), terminated(exitCode=0)]},
        Reason.INSTANCE_FAILING, "its engine ended with exit status 0", True,
    ),
    "eviction": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory.",
         "containerStatuses": [terminated(exitCode=143)]},
        "Evicted", "Evicted: The node was low on resource: memory.", True,
    ),
    "preemption": (
        {"phase": "Failed", "conditions": [
            condition("DisruptionTarget", reason="PreemptionByScheduler", message="for a pod of higher priority")],
         "containerStatuses": [terminated(exitCode=143)]},
        Reason.INSTANCE_FAILING, "PreemptionByScheduler: for a pod of higher priority", True,
    ),
    "the end of a pod of which nothing is known": ({"phase": "Failed"}, Reason.INSTANCE_FAILING, "has ended", True),
}  # fmt: skip


@pytest.mark.parametrize(("status", "reason", "words", "fatal"), CASES.values(), ids=CASES.keys())
def test_what_is_wrong_is_said(status, reason, words, fatal):
    problem = problem_of(status)
    assert problem is not None
    assert (problem.reason, problem.fatal) == (reason, fatal)
    assert words in problem.message


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]},
        {"initContainerStatuses": [running("model")], "containerStatuses": [waiting("PodInitializing")]},
        {"initContainerStatuses": [terminated("model", exitCode=0)], "containerStatuses": [running()]},
        {"phase": "Running", "containerStatuses": [running(), terminated("exporter", exitCode=1)]},
        {"initContainerStatuses": [terminated("proxy", exitCode=1)], "containerStatuses": [running()]},
    ],
)  # fmt: skip
def test_nothing_is_said_of_what_goes_its_way(status):
    assert problem_of(status) is None


def test_a_long_log_is_cut_to_its_end():
    problem = problem_of({"containerStatuses": [terminated(exitCode=1, message="begin " + "x" * 5000 + " the reason")]})
    assert problem is not None
    assert len(problem.message) < 600
    assert problem.message.endswith("the reason")


def document(status=None, *, annotations=None, role="prefill", **metadata):
    return {
        "metadata": {
            "name": "chat-engine-x2x4f", "namespace": "default", "uid": "u", "resourceVersion": "7",
            "creationTimestamp": CREATED, "labels": {labels.ROLE: role, labels.REVISION: "r1"},
            "annotations": annotations or {},
            "ownerReferences": [{"kind": "Note", "uid": "n"}, {"kind": "PrefillPool", "uid": "p", "controller": True}],
            **metadata,
        },
        "spec": {},
        "status": status or {},
    }  # fmt: skip


def see(status=None, *, word=None, asked=None, timeouts=None, now=NOW, looking_since=0.0, **rest):
    seen = Seen(read_pod(document(status, **rest)), Role.PREFILL, word, asked or Asked())
    given = timeouts or PodTimeouts()
    return observed(seen, now=now, timeouts=given, revision="r1", looking_since=looking_since)


UP = {"phase": "Running", "podIP": "10.0.0.7", "containerStatuses": [running()]}


@pytest.mark.parametrize(
    ("status", "word", "message"),
    [
        ({}, None, "waits for a node"),
        ({"conditions": [condition("PodScheduled")]}, None, "waits for its node"),
        ({"conditions": [condition("PodScheduled")], "initContainerStatuses": [running("model")]}, None,
         "the model is made available"),
        (UP, None, "the agent starts"),
        (UP, Word(S.STARTING), "the engine starts"),
        (UP, Word(S.STARTING, message="loads weights"), "loads weights"),
        (UNPLACED, None, "no node takes its pod: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
    ],
)  # fmt: skip
def test_one_that_starts_says_how_far_it_is(status, word, message):
    told = see(status, word=word)
    assert (told.state, told.message) == (S.STARTING, message)


def test_the_agent_is_called_once_its_container_runs():
    assert see({"podIP": "10.0.0.7", "containerStatuses": [waiting("PodInitializing")]}).agent is None
    assert see(UP).agent == "10.0.0.7:7300"
    assert see(UP | {"podIP": "fd00::7"}).agent == "[fd00::7]:7300"


def test_it_serves_when_the_kubelet_or_its_agent_says_so():
    ready = UP | {"conditions": [condition("Ready")]}
    assert see(ready).state is S.SERVING
    assert see(UP, word=Word(S.SERVING, Role.PREFILL)).state is S.SERVING
    assert see(ready, role="slot").state is S.STARTING


def test_a_slot_is_what_its_agent_says():
    for state in (S.SLOT, S.GATED, S.FAILED, S.STARTING):
        assert see(UP, role="slot", word=Word(state)).state is state
    assert see(UP, role="slot", word=Word(S.SLOT)).slot


def test_phases_of_the_pod_come_before_those_of_the_agent():
    from kllm_operator.substrate.base import StartPhase

    reached = {"PodScheduled": "2026-11-30T10:00:01Z", "Initialized": "2026-11-30T10:00:08Z"}
    status = UP | {"conditions": [condition(kind, at=at) for kind, at in reached.items()]}
    told = see(status, word=Word(S.SERVING, phases=(StartPhase("weights", 2.5),)))
    assert [(phase.name, phase.seconds) for phase in told.phases] == [
        ("scheduled", 1.0), ("initialised", 7.0), ("agent", 1.0), ("weights", 2.5),
    ]  # fmt: skip
    assert told.age_seconds == 60.0


def test_what_is_late_has_failed():
    soon = PodTimeouts(serving=50.0, fetching=50.0)
    assert see(UP, timeouts=soon).message == "is not ready after 50 s"
    assert see(UP, timeouts=soon, annotations={labels.BEGAN_AT: "2026-11-30T10:00:30Z"}).state is S.STARTING
    fetching = {"initContainerStatuses": [running("model")]}
    assert see(fetching, timeouts=soon).message == "its model is not there after 50 s"
    assert see({}, timeouts=soon).state is S.STARTING
    assert see(UP, timeouts=soon, word=Word(S.SERVING)).state is S.SERVING


def test_one_that_lost_its_readiness_serves_until_its_agent_says_otherwise():
    """A node that the API server did not hear for a while has all of its pods marked so, while they serve."""
    lost = UP | {"conditions": [condition("Ready", "False", at="2026-11-30T10:00:40Z")]}
    soon = PodTimeouts(serving=10.0)
    assert see(lost, timeouts=soon).state is S.SERVING
    assert see(lost, word=Word(S.STARTING)).state is S.STARTING
    assert see(lost, timeouts=soon, word=Word(S.FAILED, message="out of luck")).message == "out of luck"
    never = UP | {"conditions": [condition("Ready", "False", at=CREATED)]}
    assert see(never).state is S.STARTING
    assert see(never, timeouts=soon).state is S.FAILED
    assert see(lost, role="slot", word=Word(S.SLOT)).state is S.SLOT


def test_who_begins_to_look_holds_an_earlier_silence_against_nobody():
    """A slot is old and never ready, and its agent needs a moment to tell a new leader that it waits."""
    soon = PodTimeouts(serving=50.0)
    assert see(UP, role="slot", timeouts=soon, looking_since=NOW - 1).state is S.STARTING
    assert see(UP, role="slot", timeouts=soon, looking_since=NOW - 51).state is S.FAILED


def test_the_kubelet_vouches_for_what_it_hears():
    assert see(UP | {"conditions": [condition("Ready")]}).vouched
    assert not see(UP, word=Word(S.SERVING)).vouched


def test_one_that_is_being_deleted_is_ending_and_nobody_asks_anything_of_it():
    told = see(UP, deletionTimestamp=STARTED, annotations={labels.REQUESTED: "Drain"})
    assert (told.ending, told.requested) == (True, None)
    assert "someone else" in told.message
    assert see(UP, annotations={labels.REQUESTED: "Drain"}).requested is Request.DRAIN


def test_nothing_is_asked_of_one_that_switches_its_role():
    """Its flip is what is being done, and would be judged a second time, as one of an instance that does not serve."""
    notes = {labels.SWITCHING_TO: "prefill", labels.REQUESTED: "Flip"}
    assert see(UP, annotations=notes).requested is None


def test_steps_are_told_of_before_the_pod_tells_of_them():
    ready = UP | {"conditions": [condition("Ready")]}
    assert see(ready, asked=Asked(draining=True)).state is S.DRAINING
    assert see(ready, asked=Asked(ending=True)).ending
    switching = see(ready, asked=Asked(switching=Role.DECODE), annotations={labels.DRAIN_UNTIL: STARTED})
    assert (switching.role, switching.state) == (Role.DECODE, S.STARTING)
    given_ = see(UP, role="slot", asked=Asked(role=Role.DECODE))
    assert (given_.role, given_.slot) == (Role.DECODE, False)


@given(st.floats(0, 4e9))
def test_times_survive_on_the_pod_to_the_millisecond(seconds):
    assert seconds_of(time_of(seconds)) == pytest.approx(seconds, abs=0.0011)


@pytest.mark.parametrize("text", [None, "", "soon", "2026-13-01T00:00:00Z", "1"])
def test_an_annotation_that_makes_no_sense_is_none(text):
    pod = read_pod(document(annotations={labels.DRAIN_UNTIL: text, labels.DRAINED: text, labels.SWITCHING_TO: text}))
    assert (pod.drain_until, pod.drained, pod.switching_to) == (None, None, None)
