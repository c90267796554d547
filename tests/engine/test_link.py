"""The plugin's link never waits, keeps events, and sends only the newest load."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from kllm_engine.messages import Heartbeat, Hello, Load, Request, decode
from kllm_engine.sglang import link as link_module
from kllm_engine.sglang.link import AgentLink


def hello() -> Hello:
    return Hello(
        pid=1,
        now=1.0,
        engine_version="0.5.21",
        role="prefill",
        page_size=16,
        kv_type="auto",
        optimistic_attempts=1,
        binding_reason="",
        max_total_num_tokens=1,
        max_running_requests=1,
        context_tokens=1,
        request_tokens=1,
        parked_limit_tokens=1,
        hooks_installed=[],
        hooks_missing=[],
        problems=[],
    )


def event(number: int) -> Request:
    return Request(pid=1, now=1.0, kind="prefill_done", rid=str(number))


def load(number: int) -> Load:
    return Load(pid=1, now=float(number), role="prefill")


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(4)
    return listener


def drain(connection: socket.socket) -> list[object]:
    connection.setblocking(False)
    received = []
    while True:
        try:
            packet = connection.recv(65536)
        except BlockingIOError:
            return received
        if not packet:
            return received
        received.append(decode(packet))


@pytest.fixture(autouse=True)
def _reconnect_at_once(monkeypatch):
    monkeypatch.setattr(link_module, "_RECONNECT_SECONDS", 0.0)


def test_messages_wait_for_the_agent_and_come_in_order(tmp_path):
    link = AgentLink(tmp_path / "s")
    link.put(load(1))
    link.put(event(1))
    link.put(hello())
    link.put(load(2))
    link.put(event(2))
    link.flush()
    with listen(tmp_path / "s") as listener:
        link.flush()
        connection, _ = listener.accept()
        with connection:
            assert drain(connection) == [hello(), event(1), event(2), load(2)]
    link.close()


def test_a_full_socket_blocks_nobody_and_loses_no_event(tmp_path):
    with listen(tmp_path / "s") as listener:
        link = AgentLink(tmp_path / "s")
        count = 5000
        began = time.monotonic()
        for number in range(count):
            link.put(event(number))
            link.put(load(number))
            link.flush()
        assert time.monotonic() - began < 5
        connection, _ = listener.accept()
        received: list[object] = []
        with connection:
            while len([message for message in received if isinstance(message, Request)]) < count:
                received += drain(connection)
                link.flush()
            received += drain(connection)
        assert [message.rid for message in received if isinstance(message, Request)] == [str(n) for n in range(count)]
        loads = [message for message in received if isinstance(message, Load)]
        assert len(loads) < count
        assert loads[-1] == load(count - 1)
        link.close()


def test_events_are_bounded_and_losses_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "EVENT_LIMIT", 3)
    link = AgentLink(tmp_path / "nobody")
    for number in range(5):
        link.put(event(number))
    assert link.lost_events == 2


def test_a_new_agent_is_greeted_again(tmp_path):
    link = AgentLink(tmp_path / "s")
    link.put(hello())
    for _ in range(2):
        with listen(tmp_path / "s") as listener:
            link.flush()
            connection, _ = listener.accept()
            with connection:
                assert hello() in drain(connection)
        (tmp_path / "s").unlink()
        link.put(Heartbeat(pid=1, now=1.0, loops=1, loop_age=0.0))
        link.flush()
    link.close()
