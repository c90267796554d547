"""`kllm-router` as a process: arguments, ports, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from router.fake_engine import FakeEngine, delta
from router.router_helpers import Client, until
from router_brain.fake_api_server import NAMESPACE, FakeApiServer, pod
from router_brain.scripted_agent import ScriptedAgent
from tokenizers import Tokenizer, models, pre_tokenizers

from kllm_core.objectives import Role
from kllm_router.discovery.kubernetes import AGENT_PORT

TOKEN = "a-token-of-enough-characters"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The arguments that name files, for a fleet without instances."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 3, "max_position_embeddings": 64}))
    (tmp_path / "fleet.json").write_text(json.dumps({"version": 1, "service": "chat", "instances": []}))
    (tmp_path / "token").write_text(TOKEN)
    return [
        *("--fleet", str(tmp_path / "fleet.json"), "--token-file", str(tmp_path / "token")),
        *("--tokenizer", str(folder), "--model-name", "words"),
    ]


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A router that listens, and its port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kllm_router.main", "--listen", "127.0.0.1:0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        event = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert event["event"] == "listening"
        yield process, int(event["http"].rpartition(":")[2])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kllm_router.main", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


async def test_it_serves_without_instances_says_so_and_ends_well(files):
    async with started(*files) as (process, port):
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.request("GET", "/readyz")
        assert (await client.answer()).status == 503
        client.request("GET", "/v1/models")
        assert (await client.answer()).json["data"][0]["id"] == "words"
        client.request("POST", "/v1/completions", json.dumps({"model": "words", "prompt": "hello"}).encode())
        assert (await client.answer()).status == 503
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        client.leave()


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, asyncio.Event]]:
    """A decode instance that streams until its gate opens, with agents and a prefill instance, as a fleet file."""
    gate = asyncio.Event()
    async with FakeEngine("p0", Role.PREFILL) as prefill, FakeEngine("d0", Role.DECODE) as decode:
        agents = [
            ScriptedAgent(e.instance_id, e.role, token=TOKEN, http_address=f"127.0.0.1:{e.endpoint.http_port}")
            for e in (prefill, decode)
        ]
        for agent in agents:
            await agent.start()

        async def computes(call, reply):
            agents[0].tell(call.body["rid"], "PREFILL_DONE", prompt_tokens=1)
            await until(lambda: decode.calls)
            reply.json(200, {})

        async def streams(call, reply):
            reply.begin()
            reply.event(delta("a"))
            await gate.wait()
            reply.chunk(b"data: [DONE]\n\n")
            reply.end()

        prefill.script, decode.script = computes, streams
        entries = [{"id": agent.id, "role": agent.role.value, "agent": agent.address} for agent in agents]
        (tmp_path / "fleet.json").write_text(json.dumps({"version": 1, "service": "chat", "instances": entries}))
        yield decode, gate
        for agent in agents:
            await agent.stop()


async def ready(port: int) -> int:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.request("GET", "/readyz")
    status = (await client.answer()).status
    client.leave()
    return status


async def streaming(port: int) -> Client:
    """A client whose stream has begun."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.post(path="/v1/completions", model="words", prompt="hello", stream=True)
    status, _ = await client.head()
    if status != 200:
        client.leave()
        pytest.fail(f"the router answered {status}")
    await client.chunk()
    return client


async def until_ready(port: int, status: int = 200) -> None:
    while True:
        if await ready(port) == status:
            return
        await asyncio.sleep(0.02)


async def test_it_is_not_ready_at_once_when_told_to_stop_and_lets_streams_finish(files, tmp_path):
    async with pair(tmp_path) as (_, gate), started(*files, "--lame-duck-seconds", "1") as (process, port):
        await until_ready(port)
        client = await streaming(port)
        process.send_signal(signal.SIGTERM)
        await until_ready(port, 503)
        late = await streaming(port)
        gate.set()
        for each in (client, late):
            assert await each.chunk() == b"data: [DONE]\n\n"
        assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.parametrize("how", ["grace_is_over", "second_signal"])
async def test_a_stream_that_does_not_finish_ends_with_an_error_event(files, tmp_path, how):
    grace = "0.2" if how == "grace_is_over" else "60"
    flags = ("--lame-duck-seconds", "0", "--drain-seconds", grace)
    async with pair(tmp_path) as (decode, _), started(*files, *flags) as (process, port):
        await until_ready(port)
        client = await streaming(port)
        process.send_signal(signal.SIGTERM)
        if how == "second_signal":
            await refuses(port)
            process.send_signal(signal.SIGTERM)
        event = await client.chunk()
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "router_stopping"
        assert await asyncio.wait_for(process.wait(), 10) == 0
        await until(lambda: decode.aborts)


async def refuses(port: int) -> None:
    """Wait until no connection is taken any more."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        writer.transport.abort()
        await asyncio.sleep(0.02)


async def test_it_serves_grpc_too_where_asked(files):
    async with started(*files, "--grpc-listen", "127.0.0.1:0") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = refused(*files, "--listen", "127.0.0.1:0", "--grpc-listen", address)
    assert result.returncode == 2
    assert "--grpc-listen" in result.stderr
    assert "Traceback" not in result.stderr


async def test_it_ends_with_its_parent(files):
    async with started(*files, "--parent-pid", str(os.getpid())):
        pass
    gone = refused(*files, "--listen", "127.0.0.1:0", "--parent-pid", "1")
    assert gone.returncode == -signal.SIGKILL


async def test_on_a_cluster_it_finds_its_instances_at_the_api_server(files, tmp_path):
    server, arguments = FakeApiServer(), files[2:]
    await server.start()
    agents = [ScriptedAgent("p1", token=TOKEN), ScriptedAgent("d2", Role.DECODE, token=TOKEN)]
    for number, agent in enumerate(agents):
        agent.host, agent.port = f"127.0.77.{number + 1}", AGENT_PORT
        await agent.start()
        await server.put(pod(agent.id, role=agent.role.value, podIP=agent.host))
    kubeconfig = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "token-of-the-test"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    flags = ("--discovery", "kubernetes", "--service", "chat", "--kubeconfig", str(tmp_path / "kubeconfig"))
    async with started(*arguments, *flags) as (process, port):
        await until_ready(port)
        await server.stop()
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.request("GET", "/kllm/v1/status")
        assert [each["id"] for each in (await client.answer()).json["instances"]] == ["d2", "p1"]
        client.request("GET", "/metrics")
        assert "kllm_router_discovery_instances 2.0" in (await client.answer()).body.decode()
        client.leave()
        assert await ready(port) == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    for agent in agents:
        await agent.stop()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "needs --fleet"),
        (("--discovery", "kubernetes"), "needs --service"),
        (("--discovery", "kubernetes", "--service", "chat", "--fleet", "f"), "--fleet is not for"),
        (("--fleet", "f", "--namespace", "n"), "--namespace is not for"),
        (("--discovery", "kubernetes", "--service", "Chat_1"), "is not a name"),
        (("--discovery", "kubernetes", "--service", "chat"), "--kubeconfig"),
        (("--discovery", "kubernetes", "--service", "chat", "--kubeconfig", "/nowhere"), "/nowhere"),
    ],
)
async def test_a_fleet_that_cannot_be_found_is_told_by_flag(files, monkeypatch, flags, said):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = refused(*files[2:], *flags)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--token-file", "/nowhere"], "--token-file"),
        (["--tokenizer", "/nowhere"], "tokenizer"),
        (["--binding", "Never"], "--binding"),
        (["--ttft-objective-milliseconds", "0"], "--ttft-objective-milliseconds"),
        (["--listen", "8000"], "HOST:PORT"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--prefill-seconds", "nan"], "--prefill-seconds"),
        (["--redis-url", "cache:6379"], "--redis-url: the URL is not redis"),
        (["--redis-url", "redis://:word@cache"], "belongs into the file of --redis-url-file"),
        (["--redis-url", "redis://cache", "--redis-url-file", "/f"], "not allowed with argument"),
    ],
)
async def test_wrong_arguments_are_named(files, change, said):
    result = refused(*files, *change)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


async def test_a_port_that_is_taken_is_named(files):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = refused(*files, "--listen", address)
    assert result.returncode == 2
    assert address in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr
