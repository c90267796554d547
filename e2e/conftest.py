"""Fixtures: the cluster, and kLLM installed on it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import targets
from e2e.cluster.cluster import Cluster
from e2e.kube import Kube
from e2e.release import Release, release

_PREFIX = "e2e-"
_LOGS = Path(os.environ.get("KLLM_E2E_LOGS") or Path(__file__).parents[1] / ".cache" / "e2e")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep objects, events and logs of the tests' namespaces when a test fails, before its fixtures delete them."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and report.when != "teardown" and isinstance(cluster, Kube):
        folder = _LOGS / item.name
        cluster.collect(folder, cluster.namespaces(_PREFIX))
        report.sections.append(("cluster", f"objects, events and logs are in {folder}"))
    return report


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Kube:
    """The cluster to test on, up; it is left up."""
    return Kube(targets.find(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="session")
def components(cluster: Kube) -> Cluster:
    """The repository's own cluster, whose components a test may stop and start."""
    if cluster.target.own is None:
        pytest.skip("this is not the repository's own cluster: its components are not the test's to stop")
    return cluster.target.own


@pytest.fixture(scope="module")
def installed(cluster: Kube) -> Iterator[Release]:
    """KLLM installed from this repository's chart, for the tests of one module."""
    with release(cluster) as made:
        yield made


@pytest.fixture
def namespace(cluster: Kube) -> Iterator[str]:
    """A namespace of the test's own."""
    with cluster.namespace(f"{_PREFIX}{os.urandom(4).hex()}") as name:
        yield name
