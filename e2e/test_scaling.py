"""Pools follow what people and loads ask for, on real pods, and no request fails meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.kube import Kube
from e2e.llm import MODEL, Llm, manifest, reached, serving
from e2e.release import Release, release
from e2e.results import result
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(900)

_POOL = {"minReplicas": 1, "maxReplicas": 2}


@pytest.fixture(scope="module")
def installed_here(cluster: Kube) -> Iterator[Release]:
    with release(cluster) as made:
        yield made


@pytest.fixture
def external(installed_here: Release) -> Iterator[Llm]:
    """A service whose counts are written by others."""
    document = manifest("outside", prefill=_POOL, decode=_POOL, scaling="External")
    with serving(installed_here.cluster, installed_here.watched, document) as llm:
        yield llm


def test_pods_follow_kubectl_scale_within_the_bounds(external: Llm) -> None:
    with result("scale_external") as kept, reached(external) as address, Traffic(address, MODEL) as traffic:
        with kept.step("prefill 1 to 2"):
            external.scale("prefill", 2)
            external.wait(lambda: external.has(2, 1), "two of prefill", seconds=90)
        traffic.go_on(20)
        advised = external.status()["advised"]
        assert advised["reason"]
        assert 1 <= advised["prefill"] <= 2
        assert external.pool("prefill")["status"]["advised"] == advised["prefill"]
        assert external.pool("prefill")["status"]["replicas"] == 2

        with kept.step("out of bounds told"):
            external.scale("prefill", 7)
            told = external.wait_for_condition("ScalingLimited", "True", "OutOfBounds", seconds=10)
        assert "7" in told["message"]
        assert "2" in told["message"]
        traffic.go_on(10)
        assert external.has(2, 1)

        with kept.step("prefill 2 to 1"):
            external.scale("prefill", 1)
            external.wait(lambda: external.has(1, 1), "one of prefill", seconds=90)
        external.wait_for_condition("ScalingLimited", "False", seconds=10)
        with kept.step("decode 1 to 2"):
            external.scale("decode", 2)
            external.wait(lambda: external.has(1, 2), "two of decode", seconds=90)
        traffic.go_on(20)
        with kept.step("decode 2 to 1"):
            external.scale("decode", 1)
            external.wait(lambda: external.has(1, 1), "one of decode", seconds=90)
        traffic.go_on(10)
        kept.note("requests", traffic.summary())
        assert traffic.failed == []
