"""From nothing to an answer and back: install, apply, Ready, answer, scale, delete."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from e2e.kube import Kube
from kllm_core import labels

EXAMPLE = Path(__file__).parents[1] / "examples" / "inferenceservice.yaml"
READY_SECONDS = 300.0
GONE_SECONDS = 120.0
LOOK_SECONDS = 0.5


def service(**spec: Any) -> dict[str, Any]:
    """The example, with other values in its spec."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    document["spec"] |= spec
    return document


def ask(address: str, question: str) -> str:
    """The service's answer to a question."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def engines(cluster: Kube, namespace: str, role: str) -> list[str]:
    """The names of the engine pods of a role that are not on their way out."""
    selector = f"{labels.SERVICE}=chat,{labels.ROLE}={role}"
    pods = cluster.list("pods", namespace=namespace, labels=selector)
    return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def test_a_service_comes_up_answers_scales_and_leaves_nothing(installed: Kube, namespace: str) -> None:
    installed.apply(service(scaling="External"), namespace=namespace)
    installed.wait("llm/chat", "condition=Ready", namespace=namespace, seconds=READY_SECONDS)
    with installed.reach("chat", 80, namespace=namespace) as address:
        assert "Paris" in ask(address, "What is the capital of France?")

        before = engines(installed, namespace, "decode")
        installed.kubectl("scale", "decodepool/chat-decode", "--replicas=2", "--namespace", namespace)
        installed.wait(
            "decodepool/chat-decode", "jsonpath={.status.ready}=2", namespace=namespace, seconds=READY_SECONDS
        )
        assert set(before) < set(engines(installed, namespace, "decode"))
        installed.kubectl("scale", "decodepool/chat-decode", "--replicas=1", "--namespace", namespace)
        until(lambda: len(engines(installed, namespace, "decode")) == 1, "one decode instance is left")
        assert "Paris" in ask(address, "What is the capital of France?")

    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "foreign", "labels": {labels.SERVICE: "chat"}},
    }
    installed.apply(foreign, namespace=namespace)
    installed.delete("llm/chat", namespace=namespace, seconds=GONE_SECONDS)
    kinds = "pods,services,deployments,secrets,roles,rolebindings,networkpolicies,poddisruptionbudgets,pp,dp,configmaps"
    selector = f"{labels.SERVICE}=chat"

    def left() -> list[str]:
        return [each["metadata"]["name"] for each in installed.list(kinds, namespace=namespace, labels=selector)]

    until(lambda: left() == ["foreign"], "only the foreign object is left")


def until(there: Any, what: str) -> None:
    """Wait for something that no condition tells."""
    deadline = time.monotonic() + GONE_SECONDS
    while not there():
        assert time.monotonic() < deadline, f"not within {GONE_SECONDS:.0f} s: {what}"
        time.sleep(LOOK_SECONDS)
