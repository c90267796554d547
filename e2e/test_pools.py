"""Pools without a service: applied alone, scaled by a person, paired by routers of one's own, deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.kube import Kube
from e2e.llm import Llm, condition
from e2e.release import Release
from e2e.results import result
from e2e.test_first_path import ask
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(1200)

_EXAMPLES = Path(__file__).parents[1] / "examples"
_POOLS = {"prefill": "prefillpool", "decode": "decodepool"}
_OURS = "pods,secrets,serviceaccounts,networkpolicies"
_START_SECONDS = 240.0
_LEAVE_SECONDS = 90.0


def example(name: str) -> list[dict[str, Any]]:
    """The documents of one example."""
    return list(yaml.safe_load_all((_EXAMPLES / f"{name}.yaml").read_text()))


def pools() -> list[dict[str, Any]]:
    """The pools of the examples, as large as this test needs them."""
    documents = [*example("prefillpool"), *example("decodepool")]
    for each in documents:
        each["spec"]["maxReplicas"] = 2
    return documents


def routers(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The example's routers, with the programs that the chart's pods run on this cluster."""
    documents = example("router")
    pod = documents[-1]["spec"]["template"]["spec"]
    for container, part in ((pod["initContainers"][0], "engine"), (pod["containers"][0], "router")):
        given = values[part]
        image = given["image"]
        container |= {"image": f"{image['repository']}:{image['tag']}", "imagePullPolicy": image["pullPolicy"]}
        container["command"] = given.get("command", container["command"])
        container["volumeMounts"] = [*container["volumeMounts"], *_mounts(given, container["name"])]
    pod["volumes"] += values["router"].get("template", {}).get("spec", {}).get("volumes", [])
    return documents


def _mounts(given: Mapping[str, Any], container: str) -> list[dict[str, Any]]:
    spec = given.get("template", {}).get("spec", {})
    named = [*spec.get("initContainers", []), *spec.get("containers", [])]
    return [mount for each in named if each["name"] == container for mount in each.get("volumeMounts", [])]


@pytest.fixture
def pair(cluster: Kube, installed: Release) -> Iterator[Llm]:
    """The service of the examples' pools, which has no object of its own; in the end its pools are gone."""
    yield Llm(cluster, installed.watched, "pair")
    for kind in _POOLS.values():
        cluster.delete(f"{kind}/pair", namespace=installed.watched)


def pool(pair: Llm, role: str) -> dict[str, Any]:
    """The object of a role's pool."""
    return pair.cluster.get(_POOLS[role], pair.name, namespace=pair.namespace)


def scale(pair: Llm, role: str, count: int, *, seconds: float) -> None:
    """As a person does it, until the pods are there and the pool says so."""
    what = f"{_POOLS[role]}/{pair.name}"
    pair.cluster.kubectl("scale", what, f"--replicas={count}", "--namespace", pair.namespace)

    def is_so() -> bool:
        pods, status = pair.pods(role), pool(pair, role)["status"]
        return (
            len(pods) == count and all(each.ready for each in pods) and status["ready"] == status["replicas"] == count
        )

    pair.wait(is_so, f"{count} of {role}", seconds=seconds)


def test_pools_alone_serve_scale_and_leave_nothing(cluster: Kube, installed: Release, pair: Llm) -> None:
    namespace = installed.watched
    with result("standalone_pools") as kept:
        with kept.step("apply to Ready"):
            cluster.apply(*pools(), namespace=namespace)
            for kind in _POOLS.values():
                cluster.wait(f"{kind}/pair", "condition=Ready", namespace=namespace, seconds=_START_SECONDS)
        for role in _POOLS:
            status = pool(pair, role)["status"]
            assert (status["desired"], status["ready"], status["replicas"]) == (1, 1, 1)
            assert {"scheduled", "zygote"} <= {each["name"] for each in status["startPhases"]}
            kept.note(f"{role}_start", {"milliseconds": status["startMilliseconds"], "phases": status["startPhases"]})
        with kept.step("routers of one's own"):
            cluster.apply(*routers(installed.values), namespace=namespace)
            cluster.kubectl(
                *("rollout", "status", "deployment/pair-router", "--namespace", namespace, "--timeout=120s"),
                seconds=150,
            )
        with cluster.reach("pair", 80, namespace=namespace) as address:
            pair.wait(lambda: _is_answered(address), "the routers have found the pools", seconds=30)
            with Traffic(address, "smollm2", streams=2) as traffic:
                for role in _POOLS:
                    with kept.step(f"{role} 1 to 2"):
                        scale(pair, role, 2, seconds=_START_SECONDS)
                    traffic.go_on(10)
                    with kept.step(f"{role} 2 to 1"):
                        scale(pair, role, 1, seconds=_LEAVE_SECONDS)
                traffic.go_on(10)
            assert traffic.failed == []
            kept.note("requests", traffic.summary())
            assert pair.events("Drained")

            cluster.kubectl("scale", "prefillpool/pair", "--replicas=9", "--namespace", namespace)
            pair.wait(
                lambda: condition(pool(pair, "prefill")["status"], "ScalingLimited")["reason"] == "OutOfBounds",
                "the count is out of bounds", seconds=10,
            )  # fmt: skip
            cluster.kubectl("scale", "prefillpool/pair", "--replicas=1", "--namespace", namespace)

        with kept.step("delete to nothing left"):
            for kind in _POOLS.values():
                cluster.delete(f"{kind}/pair", namespace=namespace)
            mine = "kllm.io/service=pair,app.kubernetes.io/managed-by=kllm-operator"
            pair.wait(lambda: not cluster.list(_OURS, namespace=namespace, labels=mine), "nothing is left", seconds=120)
        cluster.delete("deployment/pair-router", namespace=namespace)


def test_a_service_and_a_pool_do_not_fight_over_a_name(cluster: Kube, installed: Release, pair: Llm) -> None:
    namespace = installed.watched
    cluster.apply(pools()[0], namespace=namespace)
    pair.wait(lambda: pair.pods("prefill"), "its pod is made", seconds=30)
    (service,) = example("inferenceservice")
    service["metadata"]["name"] = "pair"
    cluster.apply(service, namespace=namespace)
    try:
        pair.wait_for_condition("Degraded", "True", "NameTaken", seconds=15)
        (late,) = example("prefillpool")
        late["metadata"] = {"name": "late", "labels": {"kllm.io/service": "pair"}}
        cluster.apply(late, namespace=namespace)

        def is_refused() -> bool:
            status = cluster.get("prefillpool", "late", namespace=namespace).get("status", {})
            return condition(status, "Accepted")["reason"] == "NameTaken"

        pair.wait(is_refused, "a second prefill pool is refused", seconds=15)
        assert [each.owner for each in pair.pods()] == ["pair"]
    finally:
        cluster.delete("prefillpool/late", namespace=namespace)
        cluster.delete("llm/pair", namespace=namespace)


def _is_answered(address: str) -> bool:
    try:
        return "Paris" in ask(address, "smollm2")
    except OSError:
        return False
