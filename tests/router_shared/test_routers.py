"""Two `kllm-router` processes and a real Redis."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from router.router_helpers import got
from router.test_process import TOKEN, files, pair, started, streaming, until_ready  # noqa: F401

from kllm_router.arguments import FleetFile, FleetPods
from kllm_router.metrics import RouterMetrics
from kllm_router.router import _discover

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until_shared(port, **values):
    """Wait until the status says so."""
    async with asyncio.timeout(20):
        while True:
            shared = (await got(port, "/kllm/v1/status")).json["shared"]
            if values.items() <= shared.items():
                return
            await asyncio.sleep(0.05)


async def test_routers_share_and_serve_on_while_redis_hangs_and_when_it_is_gone(redis, files, tmp_path):  # noqa: F811
    url = tmp_path / "url"
    url.write_text(redis.url)
    flags = [*files, "--redis-url-file", str(url)]
    async with pair(tmp_path) as (_, gate), started(*flags) as (_, one), started(*flags) as (_, two):
        for port in (one, two):
            await until_ready(port)
            await until_shared(port, up=True, routers=1)
        assert len(redis.written()) == 3  # of each router, and their names

        redis.suspend()
        await until_shared(one, up=False, routers=0)
        streams = [await asyncio.wait_for(streaming(port), 10) for port in (one, two)]
        redis.kill()
        streams += [await asyncio.wait_for(streaming(port), 10) for port in (one, two)]
        gate.set()
        for each in streams:
            assert await each.chunk() == b"data: [DONE]\n\n"
        assert b"kllm_router_shared_up 0.0" in (await got(two, "/metrics")).body

        redis.start()
        await until_shared(one, up=True, routers=1)


async def test_when_one_router_is_killed_the_other_serves_and_soon_counts_its_own_requests_only(redis, files, tmp_path):  # noqa: F811
    flags = [*files, "--redis-url", redis.url]
    async with pair(tmp_path) as (_, gate), started(*flags) as (killed, one), started(*flags) as (_, two):
        for port in (one, two):
            await until_ready(port)
            await until_shared(port, up=True, routers=1)
        cut, kept = await streaming(one), await streaming(two)
        killed.kill()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await cut.chunk()
        more = await asyncio.wait_for(streaming(two), 10)
        await until_shared(two, up=True, routers=0)
        gate.set()
        for each in (kept, more):
            assert await each.chunk() == b"data: [DONE]\n\n"


async def test_without_the_flag_nothing_is_shared(files):  # noqa: F811
    async with started(*files) as (_, port):
        assert "shared" not in (await got(port, "/kllm/v1/status")).json
        assert b"kllm_router_shared" not in (await got(port, "/metrics")).body


async def test_a_router_that_ends_takes_back_what_it_told(redis, files):  # noqa: F811
    async with started(*files, "--redis-url", redis.url) as (process, port):
        await until_shared(port, up=True)
        assert [key for key in redis.written() if ":router:" in key]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert not [key for key in redis.written() if ":router:" in key]


async def test_routers_of_one_service_in_one_namespace_share_whoever_named_it(tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps({
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "token-of-the-test"}}],
    }))  # fmt: skip

    def scope(fleet):
        return _discover(fleet, RouterMetrics())[1]

    assert scope(FleetPods("chat", None, kubeconfig)) == scope(FleetPods("chat", "team", kubeconfig))
    scopes = {
        scope(FleetPods("chat", "team", kubeconfig)), scope(FleetPods("chat", "other", kubeconfig)),
        scope(FleetPods("talk", "team", kubeconfig)), scope(FleetFile(tmp_path / "fleet.json")),
    }  # fmt: skip
    assert len(scopes) == 4


async def test_routers_of_one_fleet_file_share_however_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scopes = {_discover(FleetFile(path), RouterMetrics())[1] for path in (tmp_path / "fleet.json", Path("fleet.json"))}

    assert len(scopes) == 1
