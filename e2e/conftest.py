"""Fixtures: the cluster, and kLLM installed on it."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import targets
from e2e.cluster.cluster import Cluster
from e2e.kube import Kube

REPOSITORY = Path(__file__).parents[1]
RELEASE = "kllm"
RELEASE_NAMESPACE = "kllm-system"
_LOGS = Path(os.environ.get("KLLM_E2E_LOGS") or REPOSITORY / ".cache" / "e2e")
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on a test that it failed, for the fixture that collects logs."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
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


@pytest.fixture(scope="session")
def installed(cluster: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """KLLM installed from this repository's chart, and uninstalled; the kinds stay, as helm leaves them.

    What is installed already on a cluster that is not the repository's own is not replaced: the fixture fails.
    """
    values = tmp_path_factory.mktemp("values") / "values.json"
    values.write_text(json.dumps(cluster.target.values))
    action = ("install",) if cluster.target.own is None else ("upgrade", "--install")
    cluster.helm(
        *(*action, RELEASE, str(REPOSITORY / "charts" / "kllm"), "--values", str(values)),
        *("--namespace", RELEASE_NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s"),
    )
    yield cluster
    cluster.helm("uninstall", RELEASE, "--namespace", RELEASE_NAMESPACE, "--wait")
    cluster.delete(f"namespace/{RELEASE_NAMESPACE}", seconds=120)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Kube) -> Iterator[str]:
    """A namespace of the test's own; what was in it and the operator's logs are kept when the test fails."""
    with cluster.namespace(f"e2e-{os.urandom(4).hex()}") as name:
        yield name
        if request.node.stash.get(_FAILED, False):
            folder = _LOGS / request.node.name
            cluster.collect(folder, [name, RELEASE_NAMESPACE])
            request.node.add_report_section("teardown", "cluster", f"logs are in {folder}")
