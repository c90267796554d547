"""From nothing to an answer and back: install, apply, Ready, answer, scale, delete."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.kube import Kube
from e2e.llm import Llm, reached
from e2e.release import Release
from e2e.results import result

pytestmark = pytest.mark.timeout(900)

_EXAMPLE = Path(__file__).parents[1] / "examples" / "inferenceservice.yaml"
_CHILDREN = "pods,services,deployments,secrets,roles,rolebindings,networkpolicies,poddisruptionbudgets,pp,dp"
_QUESTION = "What is the capital of France?"


def ask(address: str, model: str) -> str:
    """The service's answer to a question with a known one."""
    said = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "messages": said, "max_tokens": 16, "temperature": 0})
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
    return content


def example() -> dict[str, Any]:
    """The example of the documentation, with its counts left to whoever scales."""
    document: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    document["spec"]["scaling"] = "External"
    return document


def test_a_service_comes_up_answers_scales_and_leaves_nothing(cluster: Kube, installed: Release) -> None:
    document, namespace = example(), installed.watched
    llm, model = Llm(cluster, namespace, document["metadata"]["name"]), document["spec"]["model"]["name"]
    with result("first_path") as kept:
        with kept.step("apply to Ready"):
            cluster.apply(document, namespace=namespace)
            cluster.wait(f"llm/{llm.name}", "condition=Ready", namespace=namespace, seconds=300)
        with reached(llm) as address:
            with kept.step("first answer"):
                assert "Paris" in ask(address, model)
            with kept.step("decode 1 to 2"):
                llm.scale("decode", 2)
                llm.wait(lambda: llm.has(1, 2), "two of decode", seconds=120)
            assert "Paris" in ask(address, model)
            with kept.step("decode 2 to 1"):
                llm.scale("decode", 1)
                llm.wait(lambda: llm.has(1, 1), "one of decode", seconds=120)
            assert "Paris" in ask(address, model)

        mine = f"kllm.io/service={llm.name}"
        foreign = {"name": "foreign", "labels": {"kllm.io/service": llm.name}}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": foreign}, namespace=namespace)
        with kept.step("delete to nothing left"):
            cluster.delete(f"llm/{llm.name}", namespace=namespace)
            llm.wait(
                lambda: not cluster.list(_CHILDREN, namespace=namespace, labels=mine), "nothing is left", seconds=120
            )
    left = cluster.list("configmaps", namespace=namespace, labels=mine)
    assert [each["metadata"]["name"] for each in left] == ["foreign"]
