"""Routers that tell each other through a real Redis: slow, full, gone, back, and full of what is not theirs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from router_brain.brain_helpers import wait_until
from structlog.testing import capture_logs

from kllm_router.metrics import SharedMetrics
from kllm_router.scheduling.quota import NOTHING, Spent
from kllm_router.scheduling.share import NO_SHARE, Share
from kllm_router.shared.address import parse_address
from kllm_router.shared.redis import RedisSettings, RedisShares
from kllm_router.shared.told import Told, encode

QUICK = RedisSettings(
    interval_seconds=0.02, heartbeat_seconds=0.1, connect_seconds=0.2, gone_seconds=0.5,
    least_pause_seconds=0.02, most_pause_seconds=0.1,
)  # fmt: skip
ALONE = "kllm:2:team/chat"
PEER = "0123456789abcdef"


class Router:
    """What a router has, and what it hears."""

    def __init__(self, source, *, name, scope="team/chat"):
        self.own: dict[str, Share] = {}
        self.spent: dict[str, Spent] = {}
        self.homes: dict[str, list[tuple[int, int]]] = {}
        self.heard_homes: list[tuple[str, list[tuple[int, int]]]] = []
        self.registry = CollectorRegistry()
        self.shared = RedisShares(
            source,
            scope=scope,
            name=name * 16,
            metrics=SharedMetrics(self.registry),
            settings=QUICK,
            on_home=lambda instance_id, marks, _: self.heard_homes.append((instance_id, marks)),
        )
        self.task = asyncio.get_running_loop().create_task(self.shared.run(self._told))

    def _told(self):
        return Told(shares=dict(self.own), spent=dict(self.spent), homes=dict(self.homes))

    @property
    def up(self):
        return self.shared.status()["up"]

    def hears(self, instance_id):
        return self.shared.of(instance_id, time.monotonic())

    def errors(self, reason):
        return self.registry.get_sample_value("kllm_router_shared_errors_total", {"reason": reason}) or 0

    async def leave(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def join():
    made = []

    def make(source, **values):
        source = source if isinstance(source, Path) else parse_address(source)
        made.append(Router(source, **values))
        return made[-1]

    yield make
    await asyncio.gather(*(router.leave() for router in made))


@pytest.fixture
async def pair(redis, join):
    """Two routers that hear each other: the first has something on p0."""
    first, second = join(redis.url, name="a"), join(redis.url, name="b")
    first.own["p0"] = Share(2, 1, 300)
    await wait_until(lambda: second.hears("p0") == Share(2, 1, 300))
    return first, second


async def test_routers_hear_what_the_others_have_and_not_what_they_have_themselves(redis, join, pair):
    first, second = pair
    third = join(redis.url, name="c")
    third.own["p0"] = Share(1, 0, 0)
    second.own["d0"] = Share(1, 1, 50)

    await wait_until(lambda: second.hears("p0") == Share(3, 1, 300) and first.hears("d0") == Share(1, 1, 50))
    assert first.hears("p0") == Share(1, 0, 0)
    assert second.hears("d0") == NO_SHARE
    assert first.shared.status() == {
        "up": True, "address": f"127.0.0.1:{redis.port}/0", "problem": "", "routers": 2,
    }  # fmt: skip
    assert first.registry.get_sample_value("kllm_router_shared_up") == 1
    assert first.registry.get_sample_value("kllm_router_shared_round_trip_seconds_count") > 0


async def test_what_has_ended_is_told_too(pair):
    first, second = pair
    del first.own["p0"]

    await wait_until(lambda: second.hears("p0") == NO_SHARE)
    assert len(second.shared._peers) == 1


async def test_what_keys_have_taken_and_where_prompts_went_is_heard(pair):
    first, second = pair
    first.spent["team"] = Spent(2, 10, 4000)
    first.homes["p0"] = [(1, 2**64 - 1), (7, 5)]

    await wait_until(lambda: second.shared.spent("team", time.monotonic()) == Spent(2, 10, 4000))
    await wait_until(lambda: ("p0", [(1, 2**64 - 1), (7, 5)]) in second.heard_homes)
    assert first.shared.spent("team", time.monotonic()) == NOTHING


async def test_what_keys_have_taken_counts_on_while_redis_is_gone(redis, pair):
    first, second = pair
    first.spent["team"] = Spent(2, 10, 4000)
    await wait_until(lambda: second.shared.spent("team", time.monotonic()) == Spent(2, 10, 4000))
    redis.kill()
    await wait_until(lambda: not second.up and second.hears("p0") == NO_SHARE)

    left = second.shared.spent("team", time.monotonic())
    assert left.running == 0
    assert left.requests >= 8
    assert second.shared.spent("team", time.monotonic() + 61) == NOTHING


async def test_routers_of_another_service_are_not_heard(redis, join, pair):
    other = join(redis.url, name="c", scope="team/other")
    await wait_until(lambda: other.up and f"kllm:2:team/other:router:{'c' * 16}" in redis.written())

    assert other.hears("p0") == NO_SHARE
    assert {key.rpartition(":")[0] for key in redis.written()} == {
        "kllm:2:team/chat", "kllm:2:team/chat:router", "kllm:2:team/other", "kllm:2:team/other:router"
    }  # fmt: skip


async def test_a_router_that_leaves_takes_back_what_it_told(redis, pair):
    first, second = pair
    await first.leave()

    assert f"{ALONE}:router:{'a' * 16}" not in redis.written()
    await wait_until(lambda: second.hears("p0") == NO_SHARE)


async def test_a_router_that_is_to_end_ends_whatever_it_waits_for(redis, join):
    for steps in range(60):
        router = join(redis.url, name="a")
        for _ in range(steps):
            await asyncio.sleep(0)
        router.task.cancel()
        done, _ = await asyncio.wait({router.task}, timeout=5)
        assert done, f"cancelled after {steps} steps"


async def test_all_that_is_written_expires(redis, pair):
    first, second = pair
    for router in pair:
        router.task.cancel()
    first.shared._client = second.shared._client = None  # as if both were killed
    assert redis.written()

    await wait_until(lambda: not redis.written())


async def test_what_a_killed_router_told_is_forgotten_and_its_name_removed(redis, join):
    router = join(redis.url, name="a")
    redis.ask("ZADD", f"{ALONE}:routers", "0", PEER)
    redis.ask("SET", f"{ALONE}:router:{PEER}", encode(Told(1, {"p0": Share(9, 9, 9)})))  # stays, and is never renewed
    await wait_until(lambda: router.hears("p0") == Share(9, 9, 9))
    await wait_until(lambda: router.hears("p0") == NO_SHARE)
    redis.ask("DEL", f"{ALONE}:router:{PEER}")

    await wait_until(lambda: PEER.encode() not in redis.ask("ZRANGE", f"{ALONE}:routers", "0", "-1"))
    assert router.up


async def test_a_redis_that_hangs_is_told_once_and_what_was_heard_is_forgotten(redis, pair):
    _, second = pair
    with capture_logs() as logs:
        redis.suspend()
        await wait_until(lambda: not second.up and second.hears("p0") == NO_SHARE)
        await wait_until(lambda: second.errors("timeout") >= 3)
        told = [each for each in logs if each["log_level"] == "warning"]
        assert second.registry.get_sample_value("kllm_router_shared_up") == 0
        redis.resume()
        await wait_until(lambda: second.hears("p0") == Share(2, 1, 300))

    assert [each["reason"] for each in told] == ["timeout"] * 2  # one of each router
    assert [each["event"] for each in logs if each["log_level"] == "info"].count(
        "load is shared with other routers"
    ) == 2  # fmt: skip
    assert second.up


async def test_a_redis_that_was_killed_is_found_again(redis, pair):
    _, second = pair
    redis.kill()
    await wait_until(lambda: not second.up and second.hears("p0") == NO_SHARE)
    await wait_until(lambda: second.errors("connection") >= 3)
    assert "127.0.0.1" in second.shared.status()["problem"]

    redis.start()
    await wait_until(lambda: second.up and second.hears("p0") == Share(2, 1, 300))


async def test_a_full_redis_is_told_and_used_again_when_it_has_room(redis, pair):
    _, second = pair
    redis.ask("CONFIG", "SET", "maxmemory", "1")
    await wait_until(lambda: not second.up and second.hears("p0") == NO_SHARE)
    assert "OutOfMemoryError" in second.shared.status()["problem"]
    assert second.errors("refused")

    redis.ask("CONFIG", "SET", "maxmemory", "0")
    await wait_until(lambda: second.up and second.hears("p0") == Share(2, 1, 300))


async def test_garbage_among_what_is_told_keeps_nobody_from_being_heard(redis, pair):
    first, second = pair
    members = [PEER, "f" * 16, "e" * 16, "not a router", b"\xff\xfe"]
    for member in members:
        redis.ask("ZADD", f"{ALONE}:routers", "0", member)
    redis.ask("SET", f"{ALONE}:router:{PEER}", b"\x00" * 300_000)
    redis.ask("SET", f"{ALONE}:router:{'f' * 16}", '{"sequence":1,"instances":{"p0":[1,1,"many"]}}')
    redis.ask("SADD", f"{ALONE}:router:{'e' * 16}", "another type")
    await wait_until(lambda: second.errors("garbage") >= 3)
    first.own["p0"] = Share(4, 0, 0)

    await wait_until(lambda: second.hears("p0") == Share(4, 0, 0))
    await wait_until(lambda: b"not a router" not in redis.ask("ZRANGE", f"{ALONE}:routers", "0", "-1"))
    assert second.up


async def test_names_of_another_type_are_made_anew(redis, pair):
    first, second = pair
    redis.ask("SET", f"{ALONE}:routers", "a word")
    redis.ask("PERSIST", f"{ALONE}:routers")
    await wait_until(lambda: second.errors("refused") or first.errors("refused"))
    first.own["p0"] = Share(4, 0, 0)

    await wait_until(lambda: second.hears("p0") == Share(4, 0, 0) and second.up and first.up)


async def test_something_that_is_no_redis_is_told(join):
    async def answer(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    router = join(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="a")
    await wait_until(lambda: router.errors("connection") >= 2)

    assert not router.up
    assert not router.task.done()
    server.close()


async def test_a_password_comes_with_a_file_that_may_come_late_and_is_never_told(make_redis, join, tmp_path):
    server = make_redis(password="the/secret")
    server.start()
    file = tmp_path / "url"
    with capture_logs() as logs:
        router = join(file, name="a")
        await wait_until(lambda: router.errors("address") >= 2)
        said = [router.shared.status()]
        file.write_text(server.url.replace("//", "//:wrong-secret@"))
        await wait_until(lambda: router.errors("connection") >= 2)
        said.append(router.shared.status())
        file.write_text(server.url.replace("//", "//:the%2Fsecret@"))
        await wait_until(lambda: router.up)
        said.append(router.shared.status())

    assert "cannot be read" in said[0]["problem"]
    assert "AuthenticationError" in said[1]["problem"]
    assert [each["reason"] for each in logs if each["log_level"] == "warning"] == ["address", "connection"]
    assert not re.search("secret", f"{logs}{said}")
