"""Discovery on a cluster, on an API server that fails in every way it knows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from router_brain.brain_helpers import wait_until
from router_brain.fake_api_server import NAMESPACE, FakeApiServer, pod

from kllm_core.objectives import Role
from kllm_router.discovery.access import Access
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.discovery.kubernetes import PodWatcher, instance_of
from kllm_router.discovery.pod_source import PodSourceSettings
from kllm_router.metrics import DiscoveryMetrics


class Followed:
    """What discovery told, one list of "ID role" each time."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.registry = CollectorRegistry()

    @property
    def last(self) -> list[str] | None:
        return self.told[-1] if self.told else None

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kllm_router_discovery_{name}", labels) or 0.0

    async def follow(self, watcher: PodWatcher) -> None:
        async for instances in watcher.changes():
            self.told.append([f"{instance.id} {instance.role.value}" for instance in instances])


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer()
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def following(server: FakeApiServer, **settings: float) -> AsyncIterator[Followed]:
    """A watcher that has told once, unless told to expect nothing."""
    expected = settings.pop("expected", True)
    token = settings.pop("token", "token-of-the-test")
    followed = Followed()
    watcher = PodWatcher(
        Access(server=server.url, namespace=NAMESPACE, token=token),
        service="chat",
        metrics=DiscoveryMetrics(followed.registry),
        settings=dataclasses.replace(PodSourceSettings(), **settings),
    )
    task = asyncio.create_task(followed.follow(watcher))
    try:
        if expected:
            await wait_until(lambda: followed.told and server.watching)
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_are_told_at_once_and_after_each_change(server):
    await server.put(pod("a1"))
    async with following(server) as followed:
        await server.put(pod("b2", role="decode"))
        await wait_until(lambda: followed.last == ["a1 prefill", "b2 decode"])
        await server.remove("a1")
        await wait_until(lambda: followed.last == ["b2 decode"])
    assert followed.told == [["a1 prefill"], ["a1 prefill", "b2 decode"], ["b2 decode"]]


async def test_a_service_without_pods_is_told_too(server):
    async with following(server) as followed:
        assert followed.told == [[]]


async def test_pods_of_other_services_and_components_are_left_out(server):
    router = pod("r9")
    router["metadata"]["labels"]["app.kubernetes.io/component"] = "router"
    await server.put(router)
    await server.put(pod("x1", service="other"))
    async with following(server) as followed:
        await server.put(pod("x2", service="other"))
        await server.put(pod("a3"))
        await wait_until(lambda: followed.last == ["a3 prefill"])
    assert followed.told == [[], ["a3 prefill"]]


async def test_a_pod_that_flips_changes_its_role_in_one_step(server):
    await server.put(pod("a1"))
    async with following(server) as followed:
        await server.put(pod("a1", role="decode"))
        await wait_until(lambda: len(followed.told) == 2)
    assert followed.told == [["a1 prefill"], ["a1 decode"]]


async def test_changes_of_a_pod_that_do_not_matter_are_not_told(server):
    await server.put(pod("a1"))
    async with following(server) as followed:
        await server.put(pod("a1", startTime="later"))
        await server.put(pod("z9"))
        await wait_until(lambda: followed.last == ["a1 prefill", "z9 prefill"])
    assert len(followed.told) == 2


async def test_a_pod_that_is_being_deleted_stays_until_it_has_ended(server):
    """Its agent drains by itself, and its streams may finish."""
    await server.put(pod("a1"))
    async with following(server) as followed:
        ending = pod("a1")
        ending["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
        await server.put(ending)
        await server.put(pod("a1", phase="Succeeded"))
        await wait_until(lambda: followed.last == [])
    assert followed.told == [["a1 prefill"], []]


async def test_a_long_list_comes_in_pages(server):
    for n in range(7):
        await server.put(pod(f"a{n}"))
    async with following(server, page=3) as followed:
        assert len(followed.last) == 7
    assert [query.get("continue") for query in server.requests if "watch" not in query] == [None, "3", "6"]


async def test_a_list_whose_snapshot_is_gone_begins_again(server):
    for n in range(4):
        await server.put(pod(f"a{n}"))
    page = {"metadata": {"resourceVersion": "1", "continue": "3"}, "items": [pod("gone5")]}
    server.refusals = [(200, {}, json.dumps(page).encode()), (410, {}, b"{}")]
    async with following(server) as followed:
        assert followed.told == [[f"a{n} prefill" for n in range(4)]]


async def test_a_watch_that_ends_goes_on_where_it_was(server):
    async with following(server, watch_seconds=1) as followed:
        await wait_until(lambda: sum("watch" in query for query in server.requests) >= 2)
        await server.put(pod("a1"))
        await wait_until(lambda: followed.last == ["a1 prefill"])
    assert server.lists == 1


async def test_what_happened_between_two_watches_is_not_missed(server):
    async with following(server, watch_seconds=1) as followed:
        await wait_until(lambda: server.watching == 0)
        await server.put(pod("a1"))
        await wait_until(lambda: followed.last == ["a1 prefill"])
    assert server.lists == 1


async def test_bookmarks_move_the_watch_on(server):
    async with following(server, watch_seconds=1):
        for n in range(5):
            await server.put(pod(f"x{n}", service="other"))
        await server.bookmark()
        server.compact()
        await wait_until(lambda: sum("watch" in query for query in server.requests) >= 2)
        await wait_until(lambda: server.watching == 1)
    assert server.lists == 1


async def test_a_watch_that_is_too_old_lists_again(server):
    await server.put(pod("a1"))
    async with following(server, watch_seconds=1) as followed:
        await server.remove("a1", silently=True)
        await server.put(pod("b2"), silently=True)
        server.compact()
        await wait_until(lambda: followed.last == ["b2 prefill"])
        assert followed.metric("connected") == 1
        assert followed.metric("failures_total", reason="expired") == 0
        assert followed.metric("lists_total") == 2


async def test_a_dropped_watch_finds_what_vanished_meanwhile(server):
    await server.put(pod("a1"))
    await server.put(pod("b2"))
    async with following(server) as followed:
        await server.remove("a1", silently=True)
        await server.drop()
        await wait_until(lambda: followed.last == ["b2 prefill"])


async def test_the_last_instances_stay_while_the_api_server_is_away_and_a_metric_says_so(server):
    await server.put(pod("a1"))
    async with following(server) as followed:
        await server.stop()
        await wait_until(lambda: followed.metric("failures_total", reason="unreachable") >= 2)
        assert followed.metric("connected") == 0
        assert followed.metric("instances") == 1
        assert followed.told == [["a1 prefill"]]
        await server.put(pod("b2"), silently=True)
        await server.start()
        await wait_until(lambda: followed.last == ["a1 prefill", "b2 prefill"])
        assert followed.metric("connected") == 1


async def test_an_api_server_that_comes_back_unchanged_tells_nothing_new(server):
    await server.put(pod("a1"))
    async with following(server) as followed:
        await server.stop()
        await wait_until(lambda: followed.metric("connected") == 0)
        await server.start()
        await wait_until(lambda: followed.metric("connected") == 1)
    assert followed.told == [["a1 prefill"]]


async def test_a_watch_that_falls_silent_is_given_up(server):
    async with following(server, stall_seconds=0.2) as followed:
        server.mute = True
        await server.put(pod("a1"), silently=True)
        await wait_until(lambda: followed.last == ["a1 prefill"])
        assert followed.metric("failures_total", reason="timeout") >= 1


async def test_a_token_that_was_replaced_is_read_again(server, tmp_path):
    token = tmp_path / "token"
    token.write_text("old")
    await server.put(pod("a1"))
    async with following(server, token=token, expected=False) as followed:
        await wait_until(lambda: followed.metric("failures_total", reason="unauthorized") >= 1)
        token.write_text("token-of-the-test\n")
        await wait_until(lambda: followed.last == ["a1 prefill"])


async def test_a_token_file_that_is_missing_for_a_moment_ends_nothing(server, tmp_path):
    await server.put(pod("a1"))
    async with following(server, token=tmp_path / "token", expected=False) as followed:
        await wait_until(lambda: followed.metric("failures_total", reason="access") >= 1)
        (tmp_path / "token").write_text("token-of-the-test")
        await wait_until(lambda: followed.last == ["a1 prefill"])


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((403, {}, b'{"message": "pods is forbidden"}'), "forbidden"),
        ((500, {}, b"\xff\xfe not json"), "server_error"),
        ((302, {"location": "http://127.0.0.1:1/"}, b""), "refused"),
        ((200, {}, b"<html>"), "garbage"),
        ((200, {}, b"[]"), "garbage"),
        ((200, {}, b'{"items": []}'), "garbage"),
        ((200, {}, b'{"items": 1, "metadata": {"resourceVersion": "1"}}'), "garbage"),
        ((200, {}, b'{"items": [], "metadata": {}}'), "garbage"),
        ((200, {"content-encoding": "gzip"}, b"not gzip"), "unreachable"),
    ],
)
async def test_a_list_that_fails_is_asked_for_again(server, refusal, reason):
    await server.put(pod("a1"))
    server.refusals = [refusal]
    async with following(server) as followed:
        assert followed.told == [["a1 prefill"]]
        assert followed.metric("failures_total", reason=reason) == 1


async def test_an_api_server_that_asks_to_wait_is_waited_for(server):
    server.refusals = [(429, {"retry-after": "1"}, b"{}")]
    began = asyncio.get_running_loop().time()
    async with following(server) as followed:
        assert followed.metric("failures_total", reason="too_many_requests") == 1
    assert asyncio.get_running_loop().time() - began >= 1


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"[]\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": "x"}}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n',
        b'{"type": "ERROR", "object": {}}\n',
        b'{"type": "ADDED", "object": "' + b"x" * 3000,
    ],
)
async def test_a_watch_that_breaks_begins_again_from_a_list(server, line):
    await server.put(pod("a1"))
    async with following(server, event_bytes=2000) as followed:
        await server.say(line)
        await server.put(pod("b2"), silently=True)
        await wait_until(lambda: followed.last == ["a1 prefill", "b2 prefill"])


async def test_a_list_that_is_too_large_is_refused(server):
    await server.put(pod("a1"))
    async with following(server, page_bytes=100, expected=False) as followed:
        await wait_until(lambda: followed.metric("failures_total", reason="garbage") >= 2)
        assert followed.told == []


async def test_an_api_server_that_always_says_too_old_is_not_hammered(server):
    server.compact()
    server._oldest += 1000
    async with following(server, expected=False) as followed:
        await wait_until(lambda: server.lists >= 3)
        begun, lists = asyncio.get_running_loop().time(), server.lists
        await wait_until(lambda: server.lists == lists + 2)
        assert asyncio.get_running_loop().time() - begun > 0.3
        assert followed.told == [[]]


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_the_end_is_what_the_api_server_has(server, seed):
    rng, names = random.Random(seed), [f"a{n}" for n in range(8)]

    async def change() -> None:
        name, silently = rng.choice(names), rng.random() < 0.2
        if server.has(name) and rng.random() < 0.4:
            await server.remove(name, silently=silently)
        else:
            role, phase = rng.choice(["prefill", "decode", "slot"]), rng.choice(["Running", "Pending", "Failed"])
            await server.put(pod(name, role=role, phase=phase), silently=silently)
        if silently:
            server.compact()
            await server.drop()

    async def trouble() -> None:
        await rng.choice([server.bookmark, server.drop, lambda: server.say(b"garbage\n")])()
        if rng.random() < 0.3:
            server.compact()
        if rng.random() < 0.3:
            server.refusals.append((503, {}, b"{}"))
        if rng.random() < 0.2:
            server.tokens = {"other"} if "other" not in server.tokens else {"token-of-the-test"}

    async with following(server, watch_seconds=1) as followed:
        for _ in range(60):
            await change()
            if rng.random() < 0.15:
                await trouble()
            await asyncio.sleep(0)
        server.tokens = {"token-of-the-test"}
        server.refusals.clear()
        await wait_until(lambda: followed.last == server.running())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, DiscoveredInstance("a1", Role.PREFILL, "10.0.0.1:7300")),
        ({"podIP": "fd00::1"}, DiscoveredInstance("a1", Role.PREFILL, "[fd00::1]:7300")),
        ({"phase": "Unknown"}, DiscoveredInstance("a1", Role.PREFILL, "10.0.0.1:7300")),
        ({"phase": "Pending"}, None),
        ({"phase": "Failed"}, None),
        ({"podIP": ""}, None),
        ({"podIP": 5}, None),
    ],
)
def test_which_pods_are_instances(change, expected):
    assert instance_of(pod("a1", **change)) == expected


@pytest.mark.parametrize("role", ["slot", "", "Prefill"])
def test_pods_without_a_role_of_their_own_are_no_instances(role):
    assert instance_of(pod("a1", role=role)) is None


@pytest.mark.parametrize("broken", [{}, {"metadata": 1, "status": []}, {"metadata": {"name": "a", "labels": [1]}}])
def test_a_pod_of_another_shape_is_no_instance(broken):
    assert instance_of(broken) is None
