"""What an agent does beside its engine does not end unseen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_agent.harness import PYTHON, until

from kllm_engine.agent.helpers import kept_up

DEAF = (*PYTHON, str(Path(__file__).with_name("deaf_agent.py")))


async def test_work_that_fails_is_begun_again_until_it_is_done() -> None:
    tries = []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("the disk is away")

    await kept_up("log", work, pause_seconds=0.001)
    assert len(tries) == 3


async def test_work_that_is_cancelled_is_not_begun_again() -> None:
    tries = []

    async def work() -> None:
        tries.append(1)
        await asyncio.sleep(60)

    task = asyncio.create_task(kept_up("log", work))
    await until(lambda: tries, "it began")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(tries) == 1


async def test_a_log_that_cannot_be_read_for_a_while_is_forwarded_again_afterwards(agents, run_dir: Path) -> None:
    """The engine serves all the while."""
    agent, told = agents(), run_dir / "stderr"
    with told.open("wb") as stderr:
        await agent.start("--forward-engine-log", stderr=stderr)
        await agent.event("serving")
        log = run_dir / "logs" / f"{agent.instance_id}.engine.log"
        aside = log.rename(run_dir / "aside")
        log.mkdir()
        await until(lambda: "IsADirectoryError" in told.read_text(), "the failure was logged")
        log.rmdir()
        aside.rename(log)
        with log.open("a") as file:
            file.write("a line of afterwards\n")
        await until(lambda: "a line of afterwards" in told.read_text(), "the log was forwarded again")
    assert agent.process.returncode is None


async def test_an_agent_that_cannot_hear_its_plugin_fails_with_the_engine(agents) -> None:
    """Which requests the engine holds would be unknown: another instance takes its place."""
    agent = agents()
    await agent.start(program=DEAF)
    await agent.event("serving")
    engine = {each.pid for each in agent.engine_processes()}
    agent.order(do="request", fields={"kind": "prefill_done", "rid": "a" * 32})
    message = (await agent.event("failed"))["message"]
    assert "not heard any more" in message
    assert "no such book" in message
    assert await agent.exit_code() == 1
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engine), "the engine has ended")
