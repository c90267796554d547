"""What both discoveries promise: the file's and the API server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest
from prometheus_client import CollectorRegistry
from router_brain.brain_helpers import wait_until
from router_brain.fake_api_server import NAMESPACE, FakeApiServer, pod

from kllm_router.discovery.access import Access
from kllm_router.discovery.file import watch_fleet_file
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.discovery.kubernetes import PodWatcher
from kllm_router.metrics import DiscoveryMetrics


class Place(Protocol):
    """Where instances are written down."""

    async def write(self, roles: dict[str, str]) -> None: ...

    async def vanish(self) -> None: ...

    def discover(self) -> AsyncIterator[list[DiscoveredInstance]]: ...


class FilePlace:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def write(self, roles: dict[str, str]) -> None:
        entries = [{"id": name, "role": role, "agent": f"a:{name}"} for name, role in roles.items()]
        part = self._path.with_suffix(".new")
        part.write_text(json.dumps({"version": 1, "instances": entries}))
        part.rename(self._path)

    async def vanish(self) -> None:
        self._path.unlink(missing_ok=True)

    def discover(self) -> AsyncIterator[list[DiscoveredInstance]]:
        return watch_fleet_file(self._path, poll_seconds=0.005)


class ClusterPlace:
    def __init__(self, server: FakeApiServer) -> None:
        self._server = server
        self._roles: dict[str, str] = {}
        self._away = False

    async def write(self, roles: dict[str, str]) -> None:
        if self._away:
            await self._server.start()
        self._away = False
        for name in self._roles.keys() - roles.keys():
            await self._server.remove(name)
        for name, role in roles.items():
            if self._roles.get(name) != role:
                await self._server.put(pod(name, role=role))
        self._roles = roles

    async def vanish(self) -> None:
        await self._server.stop()
        self._away = True

    def discover(self) -> AsyncIterator[list[DiscoveredInstance]]:
        access = Access(server=self._server.url, namespace=NAMESPACE, token="token-of-the-test")
        return PodWatcher(access, service="chat", metrics=DiscoveryMetrics(CollectorRegistry())).changes()


@pytest.fixture(params=["file", "cluster"])
async def place(request, tmp_path) -> AsyncIterator[Place]:
    if request.param == "file":
        yield FilePlace(tmp_path / "fleet.json")
        return
    server = FakeApiServer()
    await server.start()
    yield ClusterPlace(server)
    await server.stop()


@pytest.fixture
async def told(place) -> AsyncIterator[list[dict[str, str]]]:
    """Roles by id, each time that discovery told them."""
    seen: list[dict[str, str]] = []

    async def follow() -> None:
        async for instances in place.discover():
            roles = {instance.id: instance.role.value for instance in instances}
            seen.append(roles)

    task = asyncio.create_task(follow())
    yield seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_instances_come_and_go(place, told):
    for roles in ({"a1": "prefill"}, {"a1": "prefill", "b2": "decode"}, {"b2": "decode"}, {}):
        await place.write(roles)
        await wait_until(lambda roles=roles: told and told[-1] == roles)


async def test_a_flip_is_one_change_of_the_same_instance(place, told):
    await place.write({"a1": "prefill"})
    await wait_until(lambda: told and told[-1] == {"a1": "prefill"})
    count = len(told)
    await place.write({"a1": "decode"})
    await wait_until(lambda: len(told) > count)
    assert told[count:] == [{"a1": "decode"}]


async def test_what_cannot_be_read_leaves_the_last_instances_in_force(place, told):
    await place.write({"a1": "prefill"})
    await wait_until(lambda: told and told[-1] == {"a1": "prefill"})
    await place.vanish()
    await place.write({"b2": "decode"})
    await wait_until(lambda: told[-1] == {"b2": "decode"})
    assert {} not in told[1:]


async def test_whoever_comes_late_is_told_at_once(place):
    await place.write({"a1": "prefill"})
    async with asyncio.timeout(10):
        async for instances in place.discover():
            assert [instance.id for instance in instances] == ["a1"]
            break
