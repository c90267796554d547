"""What stops a real engine, or only a part of it, is seen within seconds; what goes on again serves again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bare_fleet import Agent, BareFleet, bare_fleet

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role
from kllm_engine.agent.processes import Process, members

pytestmark = pytest.mark.engines

FAILED_SECONDS = 4.5
"""The limit of 3 s, the agent's ticks, and two cores that others use as well."""


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[BareFleet]:
    async with bare_fleet() as running:
        yield running


@pytest.fixture
async def patient(fleet: BareFleet) -> AsyncIterator[Agent]:
    """An instance that waits for long before it kills its engine."""
    agent = await fleet.start("patient", Role.DECODE, "--hang-grace-seconds", "60")
    await agent.serving()
    yield agent
    await agent.stop()


def processes(agent: Agent, which: str = "all") -> list[Process]:
    """The engine's processes, or only its scheduler, or only its HTTP server, which leads their group."""
    found = [each for pid in _writers(agent.log) for each in members(os.getpgid(pid))]
    unique = {each.pid: each for each in found}.values()
    if which == "scheduler":
        return [each for each in unique if each.title.startswith("sglang::scheduler")]
    return [each for each in unique if which == "all" or each.pid == each.group]


def _writers(log: Path) -> list[int]:
    """Processes whose output goes to a log."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "fd" / "1").readlink() == log:
                found.append(int(entry.name))
    return found


async def seconds_until(agent: Agent, state: int) -> float:
    """How long it takes until the instance reports a state."""
    began = time.monotonic()
    watch = agent.watch(50)
    async with asyncio.timeout(30):
        while (await watch.read()).state != state:
            pass
    watch.cancel()
    return time.monotonic() - began


@pytest.mark.parametrize("victims", ["scheduler", "http", "all"])
async def test_a_stopped_engine_has_failed_in_three_seconds_and_serves_again_when_it_goes_on(
    fleet: BareFleet, patient: Agent, victims: str
):
    chosen = processes(patient, victims)
    assert chosen
    before = await patient.instance()
    for part in chosen:
        os.kill(part.pid, signal.SIGSTOP)
    withdrawn = await seconds_until(patient, engine_pb2.INSTANCE_STATE_STARTING)
    failed = withdrawn + await seconds_until(patient, engine_pb2.INSTANCE_STATE_FAILED)
    assert withdrawn < 1.5
    assert 2.0 < failed < FAILED_SECONDS
    assert (await patient.instance()).message.startswith("hung: ")
    for part in chosen:
        os.kill(part.pid, signal.SIGCONT)
    await seconds_until(patient, engine_pb2.INSTANCE_STATE_SERVING)
    assert (await patient.instance()).incarnation == before.incarnation


async def test_an_engine_that_stays_stopped_is_killed_after_its_grace_and_leaves_its_ports(fleet: BareFleet):
    agent = await fleet.start("hasty", Role.PREFILL, "--hang-grace-seconds", "1")
    await agent.serving()
    instance = await agent.instance()
    prefill_ids = [random.Random(1).randrange(10, 500) for _ in range(50)]
    waiting = asyncio.ensure_future(
        fleet.http.post(f"http://{instance.http_address}/generate", json=fleet.body(instance, prefill_ids, 4))
    )
    for part in processes(agent):
        os.kill(part.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert (await agent.event())["message"].startswith("hung: ")
    assert await asyncio.wait_for(agent.process.wait(), 30) == 1
    assert 3.0 < time.monotonic() - began < FAILED_SECONDS + 2
    assert not processes(agent)
    for port in (int(instance.http_address.rpartition(":")[2]), instance.bootstrap_port):
        with socket.create_server(("127.0.0.1", port)):
            pass
    waiting.cancel()
