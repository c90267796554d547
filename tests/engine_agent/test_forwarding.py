"""The engine's log reaches the agent's stderr, whole and without the token, and its file does not fill memory."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from engine_agent.harness import until

from kllm_engine.agent.forwarding import LogForwarder

SECRET = "a-token-for-tests-only"


def _forwarder(path: Path) -> tuple[LogForwarder, io.BytesIO]:
    out = io.BytesIO()
    return LogForwarder(path, secret=SECRET, out=out), out


def test_lines_are_copied_once_they_are_whole(tmp_path) -> None:
    log = tmp_path / "log"
    forwarder, out = _forwarder(log)
    assert not forwarder.copy()
    log.write_text("one\ntw")
    forwarder.copy()
    assert out.getvalue() == b"one\n"
    with log.open("a") as file:
        file.write("o\n")
    forwarder.copy()
    assert out.getvalue() == b"one\ntwo\n"


def test_the_token_is_not_copied_even_when_it_was_written_in_two_parts(tmp_path) -> None:
    log = tmp_path / "log"
    forwarder, out = _forwarder(log)
    log.write_text(f"key {SECRET[:5]}")
    forwarder.copy()
    with log.open("a") as file:
        file.write(f"{SECRET[5:]}!\n")
    forwarder.copy()
    assert out.getvalue() == b"key (token)!\n"


def test_a_long_log_takes_little_room_and_keeps_its_end(tmp_path) -> None:
    log = tmp_path / "log"
    forwarder, out = _forwarder(log)
    line = b"x" * 1023 + b"\n"
    with log.open("ab") as file:
        for _ in range(24):
            file.write(line * 1024)
            file.flush()
            while forwarder.copy():
                pass
    assert len(out.getvalue()) == log.stat().st_size == 24 << 20
    assert log.stat().st_blocks * 512 < 12 << 20
    assert log.read_bytes().endswith(line * 1000)


async def test_what_was_written_before_the_end_is_copied(tmp_path) -> None:
    log = tmp_path / "log"
    forwarder, out = _forwarder(log)
    task = asyncio.create_task(forwarder.run())
    log.write_text("first\n")
    await until(out.getvalue, "the first line")
    with log.open("a") as file:
        file.write("last words\n")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert out.getvalue() == b"first\nlast words\n"
