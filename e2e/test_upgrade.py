"""A service that runs while what keeps it, or what it is made of, is changed: requests go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from e2e.kube import Kube
from e2e.llm import MODEL, Llm, Pod, manifest, reached, serving
from e2e.release import CHART, Release, release
from e2e.results import result
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(1200)

_ROLL_SECONDS = 400.0
"""For two starts, one after the other, on a machine that does other things too."""
_SETTLE_SECONDS = 60.0
_CHANGED = "A language model that is served, as the next version tells it."
_LOOP = {"rollout_failures": 2}
"""Each failure takes a start; two are as good as three."""


@pytest.fixture(scope="module")
def installed_here(cluster: Kube) -> Iterator[Release]:
    with release(cluster, {"loop": _LOOP}) as made:
        yield made


@pytest.fixture(scope="module")
def llm(installed_here: Release) -> Iterator[Llm]:
    """A service of one instance of each role."""
    document = manifest("chat", prefill={"maxReplicas": 1}, decode={"maxReplicas": 1})
    with serving(installed_here.cluster, installed_here.watched, document) as made:
        yield made


@pytest.fixture
def traffic(llm: Llm) -> Iterator[Traffic]:
    """Requests for the length of a test, all of which must be answered."""
    with reached(llm) as address, Traffic(address, MODEL) as made:
        yield made
    assert made.failed == []


@dataclass
class Watched:
    """What was seen of a service's pods, look after look."""

    llm: Llm
    looks: list[list[Pod]] = field(default_factory=list)
    unready: list[str] = field(default_factory=list)

    def look(self) -> list[Pod]:
        """The pods now; that the service is Ready is looked at, too."""
        pods = self.llm.pods()
        self.looks.append(pods)
        ready = self.llm.condition("Ready")
        if ready["status"] != "True":
            self.unready.append(ready["message"])
        return pods

    def are_of(self, revision: str) -> bool:
        """Whether there is one instance of each role, ready and of the revision, and nothing else."""
        pods = self.look()
        return len(pods) == 2 and all(each.ready and each.revision == revision for each in pods)

    def most_coming(self, revision: str) -> int:
        """Instances of a revision that were on their way at a time."""
        return max(sum(each.revision == revision and not each.ready for each in pods) for pods in self.looks)

    def least_ready(self) -> int:
        """Ready instances of the role that had fewest at a time."""
        return min(sum(each.ready and each.role == role for each in pods) for pods in self.looks for role in _ROLES)


_ROLES = ("prefill", "decode")


def test_requests_go_on_while_the_chart_is_upgraded(
    installed_here: Release, llm: Llm, traffic: Traffic, tmp_path: Path
) -> None:
    cluster = installed_here.cluster
    chart = tmp_path / "kllm"
    shutil.copytree(CHART, chart)
    kinds = chart / "files" / "crds" / "kllm.io_inferenceservices.yaml"
    kind = yaml.safe_load(kinds.read_text())
    told = kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
    assert _description(cluster) == told
    kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = _CHANGED
    kinds.write_text(yaml.safe_dump(kind))
    engines = {each.uid for each in llm.pods()}
    routers = _routers(llm)
    traffic.go_on(10)
    try:
        with result("chart_upgrade") as kept:
            with kept.step("helm upgrade"):
                installed_here.upgrade({"loop": {"tick_seconds": 4}, "router": {"drainSeconds": 50}}, chart=chart)
            assert _description(cluster) == _CHANGED
            with kept.step("new router"):
                llm.wait(lambda: not routers & _routers(llm), "the routers are replaced", seconds=_SETTLE_SECONDS * 3)
            traffic.go_on(20)
            llm.wait_for_condition("Ready", "True", seconds=_SETTLE_SECONDS)
            assert {each.uid for each in llm.pods()} == engines, "nothing of an engine has changed"
            kept.note("requests", traffic.summary())
    finally:
        installed_here.upgrade()
    assert _description(cluster) == told


def test_a_changed_spec_rolls_both_roles_in_step_and_a_bad_one_stops(llm: Llm, traffic: Traffic) -> None:
    llm.wait(lambda: llm.has(1, 1), "it is settled", seconds=_SETTLE_SECONDS)
    first = llm.status()["revision"]
    with result("rollout") as kept:
        watched = Watched(llm)
        with kept.step("rollout"):
            _set_arguments(llm, {"max-running-requests": 32})
            second = _new_revision(llm, first)
            llm.wait(lambda: watched.are_of(second), "all are of the new revision", seconds=_ROLL_SECONDS)
        assert watched.most_coming(second) == 1, "one at a time, of one role"
        assert watched.least_ready() == 1, "the old one leaves when the new one serves"
        assert watched.unready == []
        llm.wait_for_condition("Progressing", "False", "Settled", seconds=_SETTLE_SECONDS)
        traffic.go_on(10)

        old = {each.uid for each in llm.pods()}
        with kept.step("bad revision told"):
            _set_arguments(llm, {"attention-backend": "no-such-backend"})
            told = llm.wait_for_condition("Progressing", "False", "RolloutStopped", seconds=_ROLL_SECONDS)
        assert "no-such-backend" in told["message"], "the engine's own words"
        assert llm.events("RolloutStopped")
        traffic.go_on(20)
        assert llm.condition("Ready")["status"] == "True"
        ready = [each for each in llm.pods() if each.ready]
        assert {each.uid for each in ready} == old, "the old revision serves on"
        assert llm.counts() == (1, 1)

        with kept.step("fixed"):
            broken = llm.status()["revision"]
            _set_arguments(llm, {"attention-backend": None, "max-running-requests": 16})
            third = _new_revision(llm, broken)
            fixed = Watched(llm)
            llm.wait(lambda: fixed.are_of(third), "all are of the last revision", seconds=_ROLL_SECONDS)
        assert fixed.most_coming(third) == 1
        assert fixed.least_ready() == 1
        assert fixed.unready == []
        llm.wait_for_condition("Progressing", "False", "Settled", seconds=_SETTLE_SECONDS)
        traffic.go_on(10)
        kept.note("requests", traffic.summary())


def _set_arguments(llm: Llm, arguments: dict[str, object]) -> None:
    llm.change({role: {"engineArgs": arguments} for role in _ROLES})


def _new_revision(llm: Llm, old: str) -> str:
    llm.wait(lambda: llm.status()["revision"] != old, "the revision changes", seconds=_SETTLE_SECONDS)
    revision: str = llm.status()["revision"]
    return revision


def _description(cluster: Kube) -> str:
    """The first words that a cluster tells of a service's kind."""
    found = cluster.get("customresourcedefinition", "inferenceservices.kllm.io")
    text: str = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
    return text


def _routers(llm: Llm) -> set[str]:
    labels = f"kllm.io/service={llm.name},app.kubernetes.io/component=router"
    return {each["metadata"]["uid"] for each in llm.cluster.list("pods", namespace=llm.namespace, labels=labels)}
