"""The bundled Redis on a cluster: routers hear each other through it, and miss it without anybody noticing."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import faults
from e2e.cluster import images
from e2e.cluster.cluster import Cluster
from e2e.kube import Kube
from e2e.llm import MODEL, Llm, manifest, reached, serving
from e2e.release import Release, release
from e2e.results import result
from e2e.traffic import Traffic

pytestmark = pytest.mark.timeout(420)

_IMAGE = {"repository": "kllm/redis", "tag": "e2e", "pullPolicy": "Never"}
_STARTED_SECONDS = 120.0
_SOON_SECONDS = 20.0
_ENOUGH = 20
_LIBRARY = re.compile(r"(/\S+) \(0x")


@pytest.fixture(scope="module")
def installed_here(cluster: Kube, components: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """The chart with its Redis, whose image is made of this machine's."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not here (Debian package redis-server)")
    image = tmp_path_factory.mktemp("redis") / "redis.tar"
    libraries = _LIBRARY.findall(subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout)
    files = {str(path): Path(path).read_bytes() for path in ("/usr/bin/redis-server", *libraries)}
    images.write(image, f"{_IMAGE['repository']}:{_IMAGE['tag']}", files=files, folders=["/data", "/etc", "/tmp"])
    components.load(image)
    with release(cluster, {"redis": {"enabled": True, "image": _IMAGE}}) as made:
        yield made


@pytest.fixture(scope="module")
def llm(installed_here: Release) -> Iterator[Llm]:
    """A service with two routers."""
    sides = {"minReplicas": 1, "maxReplicas": 1}
    document = manifest("chat", prefill=sides, decode=sides, router={"replicas": 2})
    with serving(installed_here.cluster, installed_here.watched, document) as made:
        made.wait(lambda: len(faults.routers(made)) == 2, "both routers are ready", seconds=_STARTED_SECONDS)
        yield made


def test_routers_share_what_they_have_in_flight_and_go_on_without_redis(llm: Llm, installed_here: Release) -> None:
    cluster, system = installed_here.cluster, installed_here.system
    with result("redis") as told, reached(llm) as address, Traffic(address, MODEL) as load:
        llm.wait(lambda: _shared(llm, True), "both hear each other", seconds=_SOON_SECONDS)
        load.go_on(_ENOUGH)
        with told.step("Redis killed to told by both routers"):
            pods = _redis(installed_here)
            _scale(installed_here, 0)
            for pod in pods:
                faults.kill(cluster, pod, namespace=system)
            llm.wait(lambda: _shared(llm, False), "both say that Redis is gone", seconds=_SOON_SECONDS)
        load.go_on(_ENOUGH)
        with told.step("Redis wanted again to heard by both routers"):
            _scale(installed_here, 1)
            llm.wait(lambda: _shared(llm, True), "both hear each other again", seconds=_STARTED_SECONDS)
        load.go_on(_ENOUGH)
        told.note("requests", load.summary())
    assert load.failed == []


def test_an_upgrade_keeps_the_password_and_the_running_redis(llm: Llm, installed_here: Release) -> None:
    cluster, system = installed_here.cluster, installed_here.system
    secret = cluster.get("secret", f"{installed_here.name}-redis", namespace=system)["data"]
    pods = _redis(installed_here)
    installed_here.upgrade({"operator": {"podAnnotations": {"e2e": str(time.time())}}})
    assert cluster.get("secret", f"{installed_here.name}-redis", namespace=system)["data"] == secret
    assert _redis(installed_here) == pods
    llm.wait(lambda: _shared(llm, True), "both hear each other", seconds=_SOON_SECONDS)


def _redis(installed: Release) -> list[str]:
    found = installed.cluster.list("pods", namespace=installed.system, labels="app.kubernetes.io/component=redis")
    return [pod["metadata"]["name"] for pod in found]


def _scale(installed: Release, replicas: int) -> None:
    what = ("deployment", f"{installed.name}-redis", "--namespace", installed.system)
    installed.cluster.kubectl("scale", *what, f"--replicas={replicas}")


def _shared(llm: Llm, up: bool) -> bool:
    told = [faults.status(address)["shared"] for address in faults.routers(llm).values()]
    return len(told) == 2 and all(each["up"] is up and (not up or each["routers"] == 1) for each in told)
