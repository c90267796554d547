from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from engine_agent.harness import until

from kllm_engine.agent.exceptions import DeadError
from kllm_engine.agent.plugin_link import PluginLink
from kllm_engine.messages import Heartbeat, Message, encode


def _connected(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(str(path))
    return channel


def _beat(loops: int) -> bytes:
    return encode(Heartbeat(pid=1, now=1.0, loops=loops, loop_age=0.0))


async def test_messages_come_in_order_and_what_cannot_be_read_does_not_stop_them(run_dir: Path) -> None:
    heard: list[Message] = []
    path = run_dir / "a.plugin.sock"
    link = PluginLink(path, heard.append)
    running = asyncio.create_task(link.run())
    assert path.stat().st_mode & 0o077 == 0
    with _connected(path) as channel:
        for packet in (_beat(1), b"\xffgarbage", _beat(2)):
            channel.send(packet)
        await until(lambda: len(heard) == 2, "both readable messages arrived")
    with _connected(path) as again:
        again.send(_beat(3))
        await until(lambda: len(heard) == 3, "a second connection is read too")
    assert [message.loops for message in heard] == [1, 2, 3]
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert not path.exists()


async def test_a_message_that_cannot_be_handled_ends_it_with_an_error(run_dir: Path) -> None:
    """Whoever runs it must know that nothing more is heard."""

    def break_down(message: Message) -> None:
        raise KeyError(message.loops)

    link = PluginLink(run_dir / "a.plugin.sock", break_down)
    running = asyncio.create_task(link.run())
    with _connected(run_dir / "a.plugin.sock") as channel:
        channel.send(_beat(1))
        with pytest.raises(DeadError, match="not heard any more"):
            await asyncio.wait_for(running, 10)


async def test_a_socket_that_a_killed_agent_left_behind_is_taken_over(run_dir: Path) -> None:
    path = run_dir / "a.plugin.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    heard: list[Message] = []
    running = asyncio.create_task(PluginLink(path, heard.append).run())
    with _connected(path) as channel:
        channel.send(_beat(1))
        await until(lambda: heard, "the message arrived")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
