"""Polling with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def exists(pid: int) -> bool:
    """Whether a process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()
