"""Paced real engines in pods under load: each pool follows its own load, and work that moves flips a pod."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from elastic.elastic_service import PACE, TUNE, Load, send

from e2e.cluster.cluster import Cluster
from e2e.kube import Kube
from e2e.llm import Llm, Pod, manifest, reached, serving
from e2e.release import Release, release
from e2e.results import Result, result

pytestmark = pytest.mark.timeout(1500)

PROMPTS = Load(rate=2.5, seconds=90, prompt_tokens=300, output_tokens=4)
ANSWERS = Load(rate=2.0, seconds=90, prompt_tokens=30, output_tokens=60)
_REST_SECONDS = 240.0
_POOL = {"minReplicas": 1, "maxReplicas": 3, "accelerator": {"count": 1}}


@pytest.fixture(scope="module")
def installed_here(cluster: Kube, components: Cluster) -> Iterator[Release]:
    del components  # its node offers accelerators, of which the budget is made
    with release(cluster, {"engine": {"pace": PACE}, "loop": TUNE}) as made:
        yield made


@pytest.fixture
def llm(installed_here: Release) -> Iterator[Llm]:
    """One instance of each role, up to three, on four accelerators."""
    document = manifest("elastic", prefill=_POOL, decode=_POOL, gpuBudget=4)
    with serving(installed_here.cluster, installed_here.watched, document) as made:
        yield made


class Phase:
    """One load, and the pods that were there meanwhile.

    Args:
        llm: the service.
        load: to send.
        folder: for files.
    """

    def __init__(self, llm: Llm, load: Load, folder: Path) -> None:
        self.llm = llm
        self.before = {each.uid: each for each in llm.pods()}
        self.seen: dict[str, list[Pod]] = {}
        self.summary: dict[str, Any] = {}
        with reached(llm) as address, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, f"http://{address}", load, report=folder / "bench.json", environment=os.environ)
            llm.wait(lambda: self._look(sent), "the load has been sent", seconds=load.seconds + 120)
            self.summary = sent.result()

    def _look(self, sent: Future[dict[str, Any]]) -> bool:
        for pod in self.llm.pods():
            self.seen.setdefault(pod.uid, []).append(pod)
        return sent.done()

    def started(self) -> set[str]:
        """Roles in which pods were made."""
        return {pods[0].role for uid, pods in self.seen.items() if uid not in self.before}

    def flipped(self) -> list[tuple[Pod, Pod]]:
        """Pods that had another role at the end than at the beginning, as they were then."""
        return [(pods[0], pods[-1]) for pods in self.seen.values() if pods[0].role != pods[-1].role]


def test_each_pool_follows_its_load_and_work_that_moves_flips_a_pod(llm: Llm, tmp_path: Path) -> None:
    with result("elastic") as kept:

        def phase(name: str, load: Load) -> Phase:
            with kept.step(name):
                passed = Phase(llm, load, tmp_path)
            kept.note(name, passed.summary)
            assert passed.summary["ok"] == passed.summary["planned"], passed.summary
            assert passed.summary["wrong_lengths"] == 0
            return passed

        prompts = phase("prompts", PROMPTS)
        assert prompts.started() == {"prefill"}
        assert prompts.flipped() == []
        assert llm.counts()[0] >= 2
        assert any("prefill 1 to 2" in each["note"] for each in llm.events("ScaledUp")), "a decision is told"
        _rest(llm, kept, "idle after prompts")

        answers = phase("answers", ANSWERS)
        assert answers.started() == {"decode"}
        assert llm.counts() == (1, 3)

        again = phase("prompts again", PROMPTS)
        assert again.started() <= {"prefill"}
        flipped = again.flipped()
        assert flipped, "work that moves flips a pod"
        for before, after in flipped:
            assert (before.role, after.role) == ("decode", "prefill")
            assert (before.owner, after.owner) == ("elastic-decode", "elastic-prefill")
        assert llm.events("Flipped")
        kept.note("flips", len(flipped))
        _rest(llm, kept, "idle at the end")


def _rest(llm: Llm, kept: Result, name: str) -> None:
    began = time.monotonic()
    llm.wait(lambda: llm.has(1, 1), "one instance of each", seconds=_REST_SECONDS)
    kept.note(f"{name} seconds", round(time.monotonic() - began, 1))
