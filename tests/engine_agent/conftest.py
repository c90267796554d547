from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from engine_agent.harness import AgentProcess, start_zygote


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: Unix sockets must fit 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kllm-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def zygote(run_dir: Path) -> AsyncIterator[object]:
    process = await start_zygote(run_dir)
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def agents(run_dir: Path, zygote: object) -> AsyncIterator[Callable[[str], AgentProcess]]:
    """Makes agents; all of them end with the test."""
    made: list[AgentProcess] = []

    def make(instance_id: str = "chat-prefill-0") -> AgentProcess:
        made.append(AgentProcess(run_dir, instance_id))
        return made[-1]

    yield make
    for agent in made:
        await agent.stop()
