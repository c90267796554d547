"""`kubectl kllm` on a kubectl that answers from a file."""

from __future__ import annotations

import copy
import json
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from kllm.kubectl import requests
from kllm.kubectl.main import app

FAKE = Path(__file__).parent / "fake_kubectl.py"
STATUS_PATH = "/api/v1/namespaces/default/services/chat:http/proxy/kllm/v1/status"
CONDITIONS = {"Ready": ("True", "Serving", ""), "ScalingLimited": ("False", "WithinLimits", "")}


def role(**values: Any) -> dict[str, Any]:
    load = {"valueMilli": 830, "predictedMilli": 710, "measuredMilli": 830, "source": "Measured", "term": "Tpot"}
    return {"desired": 2, "ready": 1, "warming": 1, "load": load, **values}


def service(name: str = "chat", namespace: str = "default", **changes: Any) -> dict[str, Any]:
    conditions = {**CONDITIONS, **changes.pop("conditions", {})}
    phases = [{"name": "scheduled", "milliseconds": 300}, {"name": "model", "milliseconds": 2100}]
    return {
        "metadata": {
            "name": name, "namespace": namespace, "creationTimestamp": "2026-11-30T12:00:00Z",
            "annotations": changes.pop("annotations", {}),
        },
        "spec": {
            "model": {"uri": "demo://x", "name": "smollm2"}, "scaling": changes.pop("scaling", "SLO"),
            "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
            "prefill": {"minReplicas": 1, "maxReplicas": 4},
        },
        "status": {
            "conditions": [
                {"type": kind, "status": value, "reason": reason, "message": message,
                 "lastTransitionTime": "2026-11-30T12:00:00Z"}
                for kind, (value, reason, message) in conditions.items()
            ],
            "prefill": role(startMilliseconds=24100, startPhases=phases), "decode": role(desired=1, warming=0),
            "router": {"desired": 1, "ready": 1}, "url": f"http://{name}.{namespace}",
            "plan": {"prefill": 2, "decode": 1, "reason": "LoadHigh", "message": "prefill load 1.3 is above 1"},
            **changes,
        },
    }  # fmt: skip


def pod(name: str, role: str = "prefill", **changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name, "namespace": "default", "creationTimestamp": "2026-11-30T12:00:00Z",
            "labels": {
                "kllm.io/service": "chat", "app.kubernetes.io/component": "engine", "kllm.io/role": role,
                "kllm.io/revision": "0123456789",
            },
            "annotations": changes.pop("annotations", {}), **changes.pop("metadata", {}),
        },
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}], **changes
        },
    }  # fmt: skip


class Cluster:
    """What the fake kubectl answers from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.world: dict[str, Any] = {
            "inferenceservices.kllm.io": [service()],
            "pods": [pod("chat-engine-a"), pod("chat-engine-b", "decode"), pod("other-0", "router")],
            "events": [],
            "raw": {STATUS_PATH: {"instances": [told("chat-engine-a"), told("chat-engine-b", role="decode")]}},
        }
        self.world["pods"][2]["metadata"]["labels"]["app.kubernetes.io/component"] = "router"

    def kllm(self, *arguments: str) -> Result:
        (self._folder / "world.json").write_text(json.dumps(self.world))
        return CliRunner().invoke(app, arguments)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._folder / "calls").read_text().splitlines()]


def told(name: str, **changes: Any) -> dict[str, Any]:
    load = {
        "running_requests": 3, "queued_requests": 2, "parked_requests": 1, "kv_used_tokens": 25, "kv_total_tokens": 100,
        "decode_step_seconds": 0.033, "decode_tokens_per_second": 91.2,
    }  # fmt: skip
    return {
        "id": name,
        "role": "prefill",
        "state": "Serving",
        "message": "",
        "cached_blocks": 7,
        "load": load,
        **changes,
    }


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    program = tmp_path / "kubectl"
    program.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text()}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(requests, "_POLL_SECONDS", 0.01)
    return Cluster(tmp_path)


def line_of(result: Result, word: str) -> list[str]:
    return next(line.split() for line in result.stdout.splitlines() if word in line)


def test_status_lists_services_with_counts_and_loads(cluster):
    result = cluster.kllm("status")
    assert result.exit_code == 0, result.stderr
    assert line_of(result, "smollm2")[:8] == ["chat", "smollm2", "True", "1/2", "0.83", "1/1", "0.83", "1/1"]


def test_status_of_all_namespaces_says_which(cluster):
    cluster.world["inferenceservices.kllm.io"].append(service("other", "prod"))
    assert "other" not in cluster.kllm("status").stdout
    assert line_of(cluster.kllm("status", "-A"), "other")[:2] == ["prod", "other"]


def test_status_of_one_shows_pools_and_instances(cluster):
    result = cluster.kllm("status", "chat")
    assert result.exit_code == 0, result.stderr
    assert line_of(result, "prefill  Tpot")[:6] == ["prefill", "Tpot", "0.83", "0.71", "0.83", "2"]
    assert line_of(result, "24.1 s")
    assert line_of(result, "chat-engine-a")[1:7] == ["prefill", "Serving", "3", "2", "1", "25%"]
    assert "other-0" not in result.stdout


def test_wide_shows_where_instances_are(cluster):
    result = cluster.kllm("status", "chat", "-o", "wide")
    assert {"node-1", "10.0.0.1", "0123456789"} <= set(line_of(result, "chat-engine-a"))


def test_a_service_that_is_not_ready_says_why(cluster):
    cluster.world["inferenceservices.kllm.io"] = [service(conditions={"Ready": ("False", "Unschedulable", "no GPU")})]
    assert line_of(cluster.kllm("status"), "smollm2")[2] == "Unschedulable"
    cluster.world["inferenceservices.kllm.io"][0]["status"] = {}
    assert line_of(cluster.kllm("status"), "smollm2")[2] == "Unknown"


def test_a_router_that_does_not_answer_leaves_the_pods_words(cluster):
    cluster.world["raw"] = {}
    result = cluster.kllm("status", "chat")
    assert result.exit_code == 0
    assert line_of(result, "chat-engine-a")[1:7] == ["prefill", "Serving", "-", "-", "-", "-"]
    assert "no endpoints available" in result.stderr
    assert "as their pods tell" in result.stderr


@pytest.mark.parametrize("command", [("status", "chat"), ("top", "chat")])
def test_where_routers_ask_for_keys_instances_are_read_from_their_pods_and_that_is_said(cluster, command):
    cluster.world["raw"] = {}
    cluster.world["inferenceservices.kllm.io"][0]["spec"]["router"] = {"apiKeysSecretName": "keys"}
    result = cluster.kllm(*command)
    assert line_of(result, "chat-engine-a")[1:3] == ["prefill", "Serving"]
    assert line_of(result, "chat-engine-b")[1:3] == ["decode", "Serving"]
    assert "ask for API keys" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("role", "annotations", "ready", "state"),
    [
        ("prefill", {}, "False", "Starting"),
        ("slot", {}, "False", "Slot"),
        ("decode", {"kllm.io/drain-until": "2026-11-30T12:00:00Z"}, "True", "Draining"),
        ("decode", {"kllm.io/drain-until": "x", "kllm.io/switching-to": "prefill"}, "True", "Starting"),
    ],
)
def test_without_a_router_what_the_operator_wrote_on_a_pod_tells_its_state(cluster, role, annotations, ready, state):
    conditions = [{"type": "Ready", "status": ready}]
    cluster.world["raw"] = {}
    cluster.world["pods"] = [pod("chat-engine-a", role, annotations=annotations, conditions=conditions)]
    assert line_of(cluster.kllm("status", "chat"), "chat-engine-a")[1:3] == [role, state]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
         "Unschedulable"),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
         "ErrImagePull"),
        ({"phase": "Pending", "initContainerStatuses": [{"state": {"terminated": {"reason": "Error"}}}]}, "Error"),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}]}, "Pending"),
        ({"metadata": {"deletionTimestamp": "2026-11-30T12:00:00Z"}}, "Terminating"),
    ],
)  # fmt: skip
def test_what_keeps_a_pod_from_running_is_its_state(cluster, changes, state):
    cluster.world["pods"] = [pod("chat-engine-a", **copy.deepcopy(changes))]
    assert line_of(cluster.kllm("status", "chat"), "chat-engine-a")[2] == state


def test_programs_get_json_yaml_and_names(cluster):
    document = json.loads(cluster.kllm("status", "chat", "-o", "json").stdout)
    assert document["name"] == "chat"
    assert document["status"]["prefill"]["load"]["valueMilli"] == 830
    assert [each["name"] for each in document["instances"]] == ["chat-engine-b", "chat-engine-a"]
    assert yaml.safe_load(cluster.kllm("status", "chat", "-o", "yaml").stdout) == document
    assert cluster.kllm("status", "-o", "name").stdout == "inferenceservice.kllm.io/chat\n"
    assert [each["name"] for each in json.loads(cluster.kllm("status", "-o", "json").stdout)] == ["chat"]
    cluster.world["inferenceservices.kllm.io"] = []
    assert json.loads(cluster.kllm("status", "-o", "json").stdout) == []


def test_kubectl_is_told_context_namespace_and_file(cluster):
    cluster.world["inferenceservices.kllm.io"] = [service("chat", "prod")]
    cluster.kllm("status", "-n", "prod", "--context", "c", "--kubeconfig", "/k")
    assert {"--namespace=prod", "--context=c", "--kubeconfig=/k"} <= set(cluster.calls[0])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ('error: the server doesn\'t have a resource type "inferenceservices"', "install the chart"),
        ("Error from server (Forbidden): services is forbidden", "Forbidden"),
        ("The connection to the server 10.0.0.1 was refused", "refused"),
        ("", "said nothing"),
    ],
)
def test_what_kubectl_says_is_passed_on(cluster, error, said):
    cluster.world["error"] = error
    result = cluster.kllm("status")
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_service_that_is_not_there_and_wrong_flags(cluster):
    result = cluster.kllm("status", "nothing")
    assert result.exit_code == 1
    assert "not found" in result.stderr
    assert cluster.kllm("status", "-o", "xml").exit_code == 2
    assert cluster.kllm("status", "chat", "-A").exit_code == 2


def test_without_kubectl_it_says_so(cluster, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    result = cluster.kllm("status")
    assert result.exit_code == 1
    assert "PATH" in result.stderr


def test_a_status_of_another_version_is_told_by_field(cluster):
    cluster.world["inferenceservices.kllm.io"] = [service(prefill={"desired": "two"})]
    result = cluster.kllm("status")
    assert result.exit_code == 1
    assert "status.prefill.desired" in result.stderr


def test_top_shows_what_engines_do(cluster):
    result = cluster.kllm("top")
    assert result.exit_code == 0, result.stderr
    assert line_of(result, "chat-engine-b")[1:] == ["decode", "Serving", "3", "2", "1", "25%", "-", "91", "33", "7"]
    cluster.world["raw"] = {}
    without = cluster.kllm("top", "chat")
    assert without.exit_code == 1
    assert line_of(without, "chat-engine-b")[1:4] == ["decode", "Serving", "-"]


def test_explain_says_why_there_are_so_many(cluster):
    cluster.world["inferenceservices.kllm.io"] = [
        service(conditions={"ScalingLimited": ("True", "MaxReplicasReached", "decode would need 3")})
    ]
    cluster.world["events"] = [
        event("chat", "Scaled", "prefill 1 -> 2"),
        event("chat-engine-a", "Flipped", "to decode", kind="Pod"),
        event("chat-engine-a", "Pulled", "of no interest", kind="Pod"),
        event("chat", "Flipped", "to decode"),
        event("elsewhere", "Scaled", "of another service"),
        event("chat", "Killing", "of another kind", kind="Deployment"),
    ]
    text = cluster.kllm("explain", "chat").stdout
    for part in (
        "chat in default: ready (Serving)",
        "plan: prefill 2, decode 1 (LoadHigh): prefill load 1.3 is above 1",
        "prefill: 2 wanted of 1-4, 1 ready, 1 warming",
        "load: 0.83 by Tpot (predicted 0.71, measured 0.83)",
        "last start: 24.1 s (scheduled 0.3 s, model 2.1 s)",
        "ScalingLimited is True (MaxReplicasReached): decode would need 3",
        "Scaled  chat: prefill 1 -> 2",
    ):
        assert part in text
    assert text.count("to decode") == 1
    assert "of another" not in text
    assert "of no interest" not in text


def test_explain_tells_advice_pauses_and_what_instances_wait_for(cluster):
    advised = {"prefill": 3, "decode": 1, "reason": "LoadHigh", "message": "m"}
    cluster.world["inferenceservices.kllm.io"] = [
        service(scaling="External", advised=advised, annotations={"kllm.io/paused": "true"})
    ]
    cluster.world["pods"] = [pod("chat-engine-a", annotations={"kllm.io/requested": "Drain"})]
    text = cluster.kllm("explain", "chat").stdout
    assert "advice: prefill 3, decode 1 (LoadHigh): m" in text
    assert "paused" in text
    assert "chat-engine-a (prefill) Serving, Drain was asked for" in text
    assert "Events: none" in text


def event(name: str, reason: str, message: str, *, kind: str = "InferenceService") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "default"}, "involvedObject": {"kind": kind, "name": name}, "type": "Normal",
        "reason": reason, "message": message, "lastTimestamp": None, "eventTime": "2026-11-30T12:00:00.000000Z",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["drain", "flip"])
def test_a_request_is_an_annotation_on_the_pod(cluster, command):
    result = cluster.kllm(command, "chat-engine-a", "--no-wait")
    assert result.exit_code == 0, result.stderr
    asked = next(call for call in cluster.calls if call[0] == "annotate")
    assert asked[1:4] == ["pods", "chat-engine-a", f"kllm.io/requested={command.capitalize()}"]


def test_drain_waits_until_the_pod_is_gone(cluster):
    cluster.world["then"] = {"pods": []}
    result = cluster.kllm("drain", "chat-engine-a")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "pod/chat-engine-a is gone\n"


def test_flip_waits_until_the_pod_has_its_new_role(cluster):
    cluster.world["then"] = {"pods": [pod("chat-engine-a", "decode")]}
    result = cluster.kllm("flip", "chat-engine-a")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "pod/chat-engine-a is a decode instance\n"


def test_a_flip_is_not_done_while_the_server_switches(cluster):
    cluster.world["then"] = {"pods": [pod("chat-engine-a", "decode", annotations={"kllm.io/switching-to": "decode"})]}
    result = cluster.kllm("flip", "chat-engine-a", "--timeout", "1")
    assert result.exit_code == 1
    assert "did not flip within 1 s" in result.stderr


@pytest.mark.parametrize("command", ["drain", "flip"])
def test_a_request_that_the_operator_refuses_is_told_with_its_reason(cluster, command):
    cluster.world["then"] = {
        "pods": [pod("chat-engine-a")],
        "events": [event("chat-engine-a", "RequestRefused", "decode is at its maxReplicas", kind="Pod")],
    }
    result = cluster.kllm(command, "chat-engine-a")
    assert result.exit_code == 1
    assert "decode is at its maxReplicas" in result.stderr


@pytest.mark.parametrize(
    ("command", "name", "changes", "said"),
    [
        ("drain", "nothing", {}, "no pod 'nothing'"),
        ("drain", "other-0", {}, "no instance"),
        ("drain", "chat-engine-a", {"annotations": {"kllm.io/paused": "true"}}, "resume chat"),
        ("flip", "chat-engine-a", {"scaling": "External"}, "External"),
    ],
)
def test_a_request_that_makes_no_sense_is_not_made(cluster, command, name, changes, said):
    cluster.world["inferenceservices.kllm.io"] = [service(**changes)]
    result = cluster.kllm(command, name)
    assert result.exit_code == 1
    assert said in result.stderr
    assert not [call for call in cluster.calls if call[0] == "annotate"]


def test_slots_do_not_flip_and_ending_pods_are_not_drained(cluster):
    cluster.world["pods"] = [
        pod("chat-engine-s", "slot"),
        pod("chat-engine-t", metadata={"deletionTimestamp": "2026-11-30T12:00:00Z"}),
    ]
    assert "slot" in cluster.kllm("flip", "chat-engine-s").stderr
    assert "being deleted" in cluster.kllm("drain", "chat-engine-t").stderr


def test_pause_and_resume_are_an_annotation_on_the_service(cluster):
    assert cluster.kllm("pause", "chat").stdout == "inferenceservice.kllm.io/chat paused\n"
    assert cluster.kllm("resume", "chat").stdout == "inferenceservice.kllm.io/chat resumed\n"
    notes = [call[3] for call in cluster.calls if call[0] == "annotate"]
    assert notes == ["kllm.io/paused=true", "kllm.io/paused-"]
    assert cluster.kllm("pause", "nothing").exit_code == 1
