"""The zygote forks servers for its clients, and no server outlives client, zygote or its own first process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from engine.waiting import exists, is_running, until

from kllm_engine.start.client import KILLED, ForkedServer, ZygoteClient, ZygoteError

PROGRAM = Path(__file__).with_name("zygote_program.py")


@pytest.fixture
async def zygote(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(tmp_path / "z.sock"), str(tmp_path / "hold"), stdout=asyncio.subprocess.PIPE
    )
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
def fork(zygote: asyncio.subprocess.Process, tmp_path: Path) -> Callable[..., object]:
    async def start(*args: str, env: dict[str, str] | None = None, log: Path | None = None) -> ForkedServer:
        client = ZygoteClient(tmp_path / "z.sock")
        return await client.fork(name="x", args=args, env=env or {}, log=log or tmp_path / "log", timeout=20)

    return start


async def family(tmp_path: Path) -> tuple[int, int]:
    await until((tmp_path / "pids").exists)
    first, child = (tmp_path / "pids").read_text().split()
    return int(first), int(child)


async def test_exit_code_of_a_server_reaches_its_client(fork):
    server = await fork("exit", "7")
    assert await asyncio.wait_for(server.wait_exit(), 10) == 7
    assert server.status == 7
    await server.close()


async def test_an_exception_in_a_server_is_logged_and_leaves_the_zygote_alive(fork, tmp_path):
    server = await fork("raise", "the model is broken")
    assert await asyncio.wait_for(server.wait_exit(), 10) == 1
    assert "the model is broken" in (tmp_path / "log").read_text()
    assert await asyncio.wait_for((await fork("exit", "3")).wait_exit(), 10) == 3


async def test_environment_and_output_are_the_servers_own(fork, tmp_path):
    server = await fork("environment", "KLLM_TEST", env={"KLLM_TEST": "seen"})
    assert await asyncio.wait_for(server.wait_exit(), 10) == 0
    assert (tmp_path / "log").read_text().split("\n")[:2] == ["seen", "from a child"]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


async def test_kill_ends_the_whole_group(fork, tmp_path):
    server = await fork("family", str(tmp_path / "pids"))
    pids = await family(tmp_path)
    await server.kill()
    assert await asyncio.wait_for(server.wait_exit(), 10) == -signal.SIGKILL
    await until(lambda: not any(map(exists, pids)))


async def test_closing_the_connection_kills_the_server(fork, tmp_path):
    server = await fork("family", str(tmp_path / "pids"))
    pids = await family(tmp_path)
    assert pids[0] == server.pid
    await server.close()
    await until(lambda: not any(map(exists, pids)))
    assert server.status == KILLED


async def test_death_of_the_first_process_takes_its_children_along(fork, tmp_path):
    server = await fork("family", str(tmp_path / "pids"))
    first, child = await family(tmp_path)
    os.kill(first, signal.SIGKILL)
    assert await asyncio.wait_for(server.wait_exit(), 10) == -signal.SIGKILL
    await until(lambda: not exists(child))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_death_of_the_zygote_takes_every_server_along(fork, zygote, tmp_path, number):
    server = await fork("family", str(tmp_path / "pids"))
    pids = await family(tmp_path)
    zygote.send_signal(number)
    assert await asyncio.wait_for(zygote.wait(), 10) == (0 if number == signal.SIGTERM else -number)
    await until(lambda: not any(map(is_running, pids)))
    assert await asyncio.wait_for(server.wait_exit(), 10) == KILLED


async def test_a_client_may_connect_before_the_imports_are_done(tmp_path):
    (tmp_path / "hold").touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(tmp_path / "z.sock"), str(tmp_path / "hold"), stdout=asyncio.subprocess.PIPE
    )
    try:
        client = ZygoteClient(tmp_path / "z.sock")
        waiting = asyncio.create_task(
            client.fork(name="x", args=["exit", "5"], env={}, log=tmp_path / "log", timeout=20)
        )
        await until((tmp_path / "z.sock").exists)
        assert not waiting.done()
        (tmp_path / "hold").unlink()
        assert await (await waiting).wait_exit() == 5
        ready = json.loads(await process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["seconds"] > 0
    finally:
        process.kill()
        await process.wait()


async def test_a_log_that_cannot_be_written_is_refused(fork, tmp_path):
    with pytest.raises(ZygoteError, match="No such file or directory"):
        await fork("exit", "0", log=tmp_path / "missing" / "log")


async def test_without_a_zygote_the_client_gives_up_in_time(tmp_path):
    client = ZygoteClient(tmp_path / "nothing.sock")
    with pytest.raises(ZygoteError, match=r"within 0 s|did not start"):
        await client.fork(name="x", args=[], env={}, log=tmp_path / "log", timeout=0.2)


async def test_a_packet_that_is_no_request_is_refused_and_the_zygote_goes_on(fork, tmp_path):
    import socket

    assert await (await fork("exit", "0")).wait_exit() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(tmp_path / "z.sock"))
        raw.send(b'{"op":"dance"}')
        raw.settimeout(10)
        answer = await asyncio.to_thread(raw.recv, 4096)
    assert json.loads(answer)["event"] == "refused"
    assert await (await fork("exit", "4")).wait_exit() == 4
