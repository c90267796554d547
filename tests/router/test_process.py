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
from router.router_helpers import Client
from tokenizers import Tokenizer, models, pre_tokenizers

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
    (tmp_path / "token").write_text("a-token-of-enough-characters")
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--token-file", "/nowhere"], "--token-file"),
        (["--tokenizer", "/nowhere"], "tokenizer"),
        (["--binding", "Never"], "--binding"),
        (["--listen", "8000"], "HOST:PORT"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--prefill-seconds", "nan"], "--prefill-seconds"),
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
