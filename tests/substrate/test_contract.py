"""What every substrate promises, on each substrate there is. e2e runs the same on real pods."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import pytest
from substrate import drivers
from substrate.drivers import drained, seen, serving, until
from substrate.substrate_helpers import processes_with

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.substrate.exceptions import StepRefusedError, SubstrateError

P, D = Role.PREFILL, Role.DECODE
SLOT, STARTING, SERVING, DRAINING, FAILED = (
    InstanceState.SLOT, InstanceState.STARTING, InstanceState.SERVING, InstanceState.DRAINING, InstanceState.FAILED,
)  # fmt: skip


@pytest.fixture(params=["memory", "processes", "pods"])
async def driver(request, tmp_path, monkeypatch):
    folder = tmp_path / "stub"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("STUB_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    opened = {
        "memory": drivers.memory,
        "processes": lambda: drivers.processes(folder),
        "pods": lambda: drivers.pods(folder),
    }
    async with opened[request.param]() as driven:
        yield driven
    assert processes_with("XDG_RUNTIME_DIR", str(tmp_path)) == []


async def test_a_start_is_seen_at_once_and_serves_with_an_agent(driver):
    name = await driver.substrate.start(D)
    assert (await seen(driver))[name].state is STARTING
    found = await until(driver, name, SERVING)
    assert (found.role, found.ending, found.drained) == (D, False, False)
    assert found.agent is not None
    assert found.age_seconds >= 0


async def test_starts_have_ids_of_their_own_that_are_not_used_again(driver):
    first, second = await driver.substrate.start(P), await driver.substrate.start(P)
    await driver.substrate.stop(second)
    assert len({first, second, await driver.substrate.start(P)}) == 3


async def test_a_start_that_is_cancelled_leaves_nothing_and_may_be_cancelled_again(driver):
    name = driver.next_name(P)
    driver.ask(name, "slow")
    assert await driver.substrate.start(P) == name
    await driver.substrate.cancel(name)
    assert name not in await seen(driver)
    assert driver.nothing_of(name)
    await driver.substrate.cancel(name)


async def test_what_serves_is_not_cancelled(driver):
    name = await serving(driver)
    with pytest.raises(StepRefusedError, match="Serving"):
        await driver.substrate.cancel(name)
    assert (await seen(driver))[name].state is SERVING


async def test_what_is_not_ready_in_time_has_failed_and_can_be_stopped(driver):
    driver.ask(driver.next_name(D), "slow")
    driver.impatient()
    name = await driver.substrate.start(D)
    found = await until(driver, name, FAILED)
    assert "is not ready after" in found.message
    await driver.substrate.stop(name)
    assert await seen(driver) == {}


async def test_an_empty_one_is_drained_at_once_and_says_so(driver):
    name = await drained(driver)
    found = (await seen(driver))[name]
    assert (found.state, found.drained, found.overdue) == (DRAINING, True, False)
    assert await driver.substrate.drain(name, deadline_seconds=5)


async def test_a_busy_one_drains_until_it_is_empty_whoever_waits(driver):
    name = await serving(driver)
    driver.ask(name, "busy")
    first = asyncio.create_task(driver.substrate.drain(name, deadline_seconds=30))
    await until(driver, name, DRAINING)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(driver.substrate.drain(name, deadline_seconds=30))
    assert not (await seen(driver))[name].drained
    driver.ask_no_more(name, "busy")
    assert await second
    assert (await seen(driver))[name].drained


async def test_the_deadline_of_a_drain_is_told_and_the_instance_can_be_stopped(driver):
    name = await serving(driver)
    driver.ask(name, "busy")
    assert not await driver.substrate.drain(name, deadline_seconds=0.1)
    found = (await seen(driver))[name]
    assert (found.drained, found.overdue) == (False, True)
    await driver.substrate.stop(name)
    assert await seen(driver) == {}


async def test_only_what_serves_is_drained(driver):
    driver.ask(driver.next_name(P), "slow")
    name = await driver.substrate.start(P)
    with pytest.raises(StepRefusedError):
        await driver.substrate.drain(name, deadline_seconds=1)
    with pytest.raises(StepRefusedError, match="chat-decode-7"):
        await driver.substrate.drain("chat-decode-7", deadline_seconds=1)


async def test_to_which_role_it_drains_is_told_until_it_has_it(driver):
    name = await serving(driver, D)
    assert await driver.substrate.drain(name, deadline_seconds=5, to=P)
    assert (await seen(driver))[name].draining_to is P
    await driver.substrate.flip(name, P)
    assert (await seen(driver))[name].draining_to is None
    assert await driver.substrate.drain(name, deadline_seconds=5)
    assert (await seen(driver))[name].draining_to is None


async def test_a_stop_leaves_nothing_and_may_be_asked_for_by_many(driver):
    name = await drained(driver)
    await asyncio.gather(*(driver.substrate.stop(name) for _ in range(3)))
    assert name not in await seen(driver)
    assert driver.nothing_of(name)
    await driver.substrate.stop(name)
    with pytest.raises(StepRefusedError, match="chat-decode-7"):
        await driver.substrate.stop("chat-decode-7")


async def test_a_stop_goes_on_when_nobody_waits_and_is_seen_until_it_is_done(driver):
    name = await drained(driver)
    stopping = asyncio.create_task(driver.substrate.stop(name))
    await asyncio.sleep(0)
    assert (await seen(driver))[name].ending
    stopping.cancel()
    await until(driver, name, None)
    assert driver.nothing_of(name)


async def test_a_flip_lets_a_drained_one_serve_the_other_role_under_its_id(driver):
    name = await drained(driver, D)
    assert await driver.substrate.flip(name, P) > 0
    found = (await seen(driver))[name]
    assert (found.role, found.state, found.drained) == (P, SERVING, False)
    assert await driver.substrate.flip(name, P) == 0.0
    assert await driver.substrate.drain(name, deadline_seconds=5)
    await driver.substrate.flip(name, D)
    assert (await seen(driver))[name].role is D


async def test_a_flip_goes_on_when_nobody_waits_and_counts_as_coming_meanwhile(driver):
    name = await drained(driver, D)
    flipping = asyncio.create_task(driver.substrate.flip(name, P))
    await asyncio.sleep(0)
    found = (await seen(driver))[name]
    assert (found.role, found.state) == (P, STARTING)
    flipping.cancel()
    await until(driver, name, SERVING)


async def test_what_is_not_drained_does_not_flip(driver):
    name = await serving(driver)
    with pytest.raises(StepRefusedError, match="Serving"):
        await driver.substrate.flip(name, D)
    driver.ask(name, "busy")
    assert not await driver.substrate.drain(name, deadline_seconds=0.05)
    with pytest.raises(StepRefusedError):
        await driver.substrate.flip(name, D)
    assert (await seen(driver))[name].role is P


@pytest.mark.parametrize(("how", "error"), [("refuses", StepRefusedError), ("breaks", SubstrateError)])
async def test_a_flip_that_fails_leaves_it_drained_in_its_role_to_be_stopped(driver, how, error):
    name = await serving(driver, D)
    assert await driver.substrate.drain(name, deadline_seconds=5, to=P)
    driver.ask(name, how)
    with pytest.raises(error):
        await driver.substrate.flip(name, P)
    found = (await seen(driver))[name]
    assert (found.role, found.state, found.drained, found.draining_to) == (D, DRAINING, True, None)
    await driver.substrate.stop(name)
    assert await seen(driver) == {}


@pytest.mark.parametrize("state", [STARTING, SERVING, DRAINING])
async def test_a_death_is_seen_in_every_state_with_its_cause(driver, state):
    if state is STARTING:
        driver.ask(driver.next_name(D), "slow")
        name = await driver.substrate.start(D)
    else:
        name = await (serving if state is SERVING else drained)(driver, D)
    await driver.kill(name)
    found = await until(driver, name, FAILED)
    assert "SIGKILL" in found.message
    await driver.substrate.stop(name)
    assert await seen(driver) == {}


async def test_a_slot_has_no_role_until_an_instance_is_started_from_it(driver):
    if not driver.has_slots:
        with pytest.raises(StepRefusedError, match="no slots"):
            await driver.substrate.add_slot(P)
        return
    with pytest.raises(StepRefusedError):
        await driver.substrate.start(P, source=StartFrom.SLOT)
    name = await driver.substrate.add_slot(P)
    assert (await seen(driver))[name].slot
    assert (await until(driver, name, SLOT)).slot
    assert await driver.substrate.start(P, source=StartFrom.SLOT) == name
    assert not (await seen(driver))[name].slot
    assert (await until(driver, name, SERVING)).role is P


async def test_a_slot_is_given_up_at_once(driver):
    if driver.has_slots:
        name = await driver.substrate.add_slot(D)
        await until(driver, name, SLOT)
        await driver.substrate.cancel(name)
        assert await seen(driver) == {}
        assert driver.nothing_of(name)


async def test_listeners_are_told_of_every_change(driver):
    told = []
    driver.substrate.subscribe(lambda: told.append(len(told)))
    counts = []
    name = await serving(driver)
    for work in (
        lambda: driver.substrate.drain(name, deadline_seconds=5),
        lambda: driver.substrate.flip(name, D),
        lambda: driver.substrate.stop(name),
    ):
        counts.append(len(told))
        await work()
    assert 1 < counts[0] < counts[1] < counts[2] < len(told)
