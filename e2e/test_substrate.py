"""The substrate of pods on a real API server and kubelet: what all substrates promise, and what only pods can show."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from substrate import test_contract
from substrate.drivers import drained, seen, serving, until

from e2e import substrate_driver
from e2e.cluster.cluster import Cluster
from e2e.kube import Kube
from e2e.substrate_driver import ClusterPods, service_of
from kllm_core import labels
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom

# The very tests of the other substrates, with this module's driver.
globals().update({name: test for name, test in vars(test_contract).items() if name.startswith("test_")})


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where agents look for what is asked of them: open to the pods' user."""
    made = Path(tempfile.mkdtemp(prefix="kllm-stub-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def driver(cluster: Kube, components: Cluster, folder: Path) -> AsyncIterator[ClusterPods]:
    """Pods of a service of its own, on a node that is this machine."""
    del components  # asked for, since it is there on such a node only
    async with substrate_driver.cluster(cluster.target.kubeconfig, folder) as driven:
        yield driven


async def test_a_flip_keeps_the_pod(driver: ClusterPods, cluster: Kube) -> None:
    name = await drained(driver, Role.DECODE)
    before = cluster.get("pod", name)["metadata"]
    await driver.substrate.flip(name, Role.PREFILL)
    after = cluster.get("pod", name)["metadata"]
    assert after["uid"] == before["uid"]
    assert after["labels"][labels.ROLE] == "prefill"
    assert [owner["name"] for owner in after["ownerReferences"]] == [f"{driver.name}-prefill"]


async def test_a_slot_becomes_an_instance_and_the_kubelet_says_so(driver: ClusterPods, cluster: Kube) -> None:
    name = await driver.substrate.add_slot(Role.DECODE)
    await until(driver, name, InstanceState.SLOT)
    assert cluster.get("pod", name)["metadata"]["labels"][labels.ROLE] == "slot"
    assert await driver.substrate.start(Role.PREFILL, source=StartFrom.SLOT) == name
    await until(driver, name, InstanceState.SERVING)
    cluster.wait(f"pod/{name}", "condition=Ready")


async def test_a_pod_that_is_deleted_by_force_is_gone_at_once(driver: ClusterPods, cluster: Kube) -> None:
    name = await serving(driver)
    cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0")
    await until(driver, name, None)


async def test_a_pod_that_someone_evicts_is_ending_until_it_is_gone(driver: ClusterPods, cluster: Kube) -> None:
    name = await serving(driver)
    cluster.kubectl("delete", "pod", name, "--wait=false")
    await driver.list()
    found = (await seen(driver)).get(name)
    assert found is None or (found.ending and "someone else" in found.message)
    await until(driver, name, None)


async def test_a_model_folder_that_the_node_has_not_is_told_within_ten_seconds(driver: ClusterPods) -> None:
    driver.substrate.use(replace(driver.plan, service=service_of(driver.name, "/srv/no-such-model")))
    name = await driver.substrate.start(Role.PREFILL)
    async with asyncio.timeout(10):
        found = await until(driver, name, InstanceState.STARTING, lambda each: each.reason)
    assert found.reason == "FolderNotFound"
    assert "/srv/no-such-model" in found.message
    await driver.substrate.cancel(name)


async def test_phases_of_a_start_are_told(driver: ClusterPods) -> None:
    name = await serving(driver)
    phases = {phase.name: phase.seconds for phase in (await seen(driver))[name].phases}
    assert list(phases) == ["scheduled", "initialised", "agent", "engine"]
    assert all(0 <= seconds < 60 for seconds in phases.values())
