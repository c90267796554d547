"""Shared by the tests of substrates and of the command line."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kllm_core.kinds.manifest import parse_service
from kllm_core.kinds.service import InferenceService
from kllm_operator.substrate.programs import Programs

FAKE = str(Path(__file__).with_name("fake_program.py"))
MANIFEST = """
apiVersion: kllm.io/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "demo://smollm2-135m", name: smollm2}
  objectives: {ttftMilliseconds: 1000, tpotMilliseconds: 150}
"""


def fake_programs() -> Programs:
    """Programs that only print what real ones print."""
    return Programs(
        engine=(sys.executable, FAKE, "kllm_engine.main"), router=(sys.executable, FAKE, "kllm_router.main")
    )


def service(name: str = "chat") -> InferenceService:
    """A small service."""
    return parse_service(MANIFEST.replace("name: chat", f"name: {name}"))


def wait_until(condition: Callable[[], object], *, seconds: float = 20.0, what: str = "") -> None:
    """Poll a condition until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.02)


async def wait_until_async(condition: Callable[[], object], *, seconds: float = 20.0, what: str = "") -> None:
    """Poll a condition until it holds, letting the event loop run."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        await asyncio.sleep(0.02)


def processes_with(variable: str, value: str) -> list[int]:
    """Living processes that have a variable in their environment."""
    found = []
    marker = f"{variable}={value}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                marked = marker in (entry / "environ").read_bytes().split(b"\0")
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if marked and not dead:
                found.append(int(entry.name))
    return found
