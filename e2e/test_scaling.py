"""Pools follow what people ask for, on real pods, and no request fails meanwhile.

The tests share a service. Each brings it to the counts that it begins with, which the one before may have left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.kube import CommandError
from e2e.llm import MODEL, Llm, condition, manifest, reached, serving
from e2e.release import Release
from e2e.results import result
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(1200)

_POOL = {"minReplicas": 1, "maxReplicas": 2}
_START_SECONDS = 240.0
"""For one more instance on a machine that does other things too."""
_LEAVE_SECONDS = 90.0


@pytest.fixture(scope="module")
def llm(installed: Release) -> Iterator[Llm]:
    """A service whose counts are written by others."""
    document = manifest("chat", prefill=_POOL, decode=_POOL, scaling="External")
    with serving(installed.cluster, installed.watched, document) as made:
        yield made


@pytest.fixture
def traffic(llm: Llm) -> Iterator[Traffic]:
    """Requests for the length of a test, all of which must be answered."""
    with reached(llm) as address, Traffic(address, MODEL) as made:
        yield made
    assert made.failed == []


def bring_to(llm: Llm, prefill: int, decode: int) -> None:
    """These counts, as a person asks for them."""
    llm.scale("prefill", prefill)
    llm.scale("decode", decode)
    llm.wait(lambda: llm.has(prefill, decode), f"{prefill} of prefill, {decode} of decode", seconds=_START_SECONDS)


def test_pods_follow_kubectl_scale_within_the_bounds_and_wait_while_paused(llm: Llm, traffic: Traffic) -> None:
    bring_to(llm, 1, 1)
    with result("scale_external") as kept:
        before = llm.pods()
        llm.annotate("kllm.io/paused=true")
        llm.wait_for_condition("Paused", "True", seconds=10)
        llm.scale("prefill", 2)
        with kept.step("a paused service tells that it saw the count"):
            llm.wait(lambda: _is_seen(llm, "prefill"), "the pool's generation is observed", seconds=10)
        traffic.go_on(10)
        assert llm.pods() == before, "a paused service takes no step"
        assert llm.status()["prefill"]["ready"] == 1, "a paused service is observed"

        with kept.step("prefill 1 to 2"):
            llm.annotate("kllm.io/paused-")
            llm.wait(lambda: llm.has(2, 1), "two of prefill", seconds=_START_SECONDS)
        llm.wait_for_condition("Paused", "False", seconds=10)
        traffic.go_on(20)
        advised = llm.status()["advised"]
        assert advised["reason"]
        assert 1 <= advised["prefill"] <= 2
        pool = llm.pool("prefill")["status"]
        assert pool["advised"] == advised["prefill"]
        assert pool["replicas"] == 2

        with kept.step("out of bounds told"):
            llm.scale("prefill", 7)
            told = llm.wait_for_condition("ScalingLimited", "True", "OutOfBounds", seconds=10)
        assert "7" in told["message"]
        assert "2" in told["message"]
        traffic.go_on(10)
        assert llm.has(2, 1)

        with kept.step("prefill 2 to 1"):
            llm.scale("prefill", 1)
            llm.wait(lambda: llm.has(1, 1), "one of prefill", seconds=_LEAVE_SECONDS)
        llm.wait_for_condition("ScalingLimited", "False", seconds=10)
        with kept.step("decode 1 to 2"):
            llm.scale("decode", 2)
            llm.wait(lambda: llm.has(1, 2), "two of decode", seconds=_START_SECONDS)
        traffic.go_on(20)
        kept.note("requests", traffic.summary())


def test_kubectl_kllm_drains_and_flips_an_instance(llm: Llm, traffic: Traffic, installed: Release) -> None:
    bring_to(llm, 1, 2)
    kllm = installed.kllm
    with result("kubectl_kllm") as kept:
        names = {each.name for each in llm.pods()}
        assert all(name in kllm("status", "chat") for name in names)
        assert json.loads(kllm("status", "chat", "--output", "json"))
        assert "External" in kllm("explain", "chat")
        with pytest.raises(CommandError, match="External"):
            kllm("flip", llm.pods("decode")[0].name)

        leaving = llm.pods("decode")[0]
        with kept.step("drain"):
            kllm("drain", leaving.name, seconds=_START_SECONDS)
        after = llm.pods()
        assert leaving.uid not in {each.uid for each in after}
        assert llm.counts() == (1, 2), "another one came before it left"
        assert llm.events("Drained")

        kllm("pause", "chat")
        llm.wait_for_condition("Paused", "True", seconds=10)
        with pytest.raises(CommandError, match="paused"):
            kllm("drain", after[0].name)
        kllm("resume", "chat")
        llm.wait_for_condition("Paused", "False", seconds=10)

        # The planner begins with the counts that it finds.
        llm.change({"scaling": "SLO"})
        llm.wait_for_condition("Accepted", "True", seconds=10)
        moving = llm.pods("decode")[0]
        with kept.step("flip"):
            kllm("flip", moving.name)
        moved = next(each for each in llm.pods() if each.name == moving.name)
        assert moved.uid == moving.uid
        assert (moved.role, moved.owner) == ("prefill", "chat-prefill")
        traffic.go_on(20)
        assert llm.events("Flipped")
        assert "Flipped" in kllm("explain", "chat")
        llm.change({"scaling": "External"})
        kept.note("requests", traffic.summary())


def test_a_start_from_a_slot_is_faster_than_from_new(llm: Llm, traffic: Traffic) -> None:
    bring_to(llm, 1, 1)
    with result("slots") as kept:
        llm.scale("prefill", 2)
        llm.wait(lambda: llm.has(2, 1), "two of prefill", seconds=_START_SECONDS)
        new = llm.status()["prefill"]
        llm.scale("prefill", 1)
        llm.wait(lambda: llm.has(1, 1), "one of prefill", seconds=_LEAVE_SECONDS)

        with kept.step("slot filled"):
            llm.change({"prefill": {"slots": 1}})
            llm.wait(lambda: llm.status()["prefill"]["slots"] == 1, "a slot", seconds=_START_SECONDS)
        slot = llm.pods("slot")[0]
        assert llm.counts() == (1, 1), "a slot serves nothing"

        with kept.step("prefill 1 to 2 from the slot"):
            llm.scale("prefill", 2)
            llm.wait(lambda: llm.counts() == (2, 1), "two of prefill", seconds=_START_SECONDS)
        assert slot.uid in {each.uid for each in llm.pods("prefill")}
        llm.wait(lambda: llm.status()["prefill"]["startMilliseconds"] != new["startMilliseconds"], "times", seconds=10)
        taken = llm.status()["prefill"]
        kept.note("start_milliseconds", {"new": new["startMilliseconds"], "slot": taken["startMilliseconds"]})
        kept.note("start_phases", {"new": new["startPhases"], "slot": taken["startPhases"]})
        assert taken["startMilliseconds"] < new["startMilliseconds"] / 2
        assert {"scheduled", "zygote"} <= {each["name"] for each in new["startPhases"]}
        traffic.go_on(10)
        with kept.step("slot filled again"):
            llm.wait(lambda: llm.status()["prefill"]["slots"] == 1, "a slot again", seconds=_START_SECONDS)
        llm.change({"prefill": {"slots": 0}})
        bring_to(llm, 1, 1)
        assert condition(llm.status(), "Ready")["status"] == "True"
        kept.note("requests", traffic.summary())


def _is_seen(llm: Llm, role: str) -> bool:
    pool = llm.pool(role)
    return bool(pool["status"]["observedGeneration"] == pool["metadata"]["generation"])
