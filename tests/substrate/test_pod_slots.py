"""Slots as pods: what becomes of one, and which is taken."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import pytest
from substrate import drivers
from substrate.drivers import belongs_to, seen, serving, slot, until

from kllm_core.fleet import InstanceState
from kllm_core.kinds.manifest import check_service
from kllm_core.objectives import Role
from kllm_core.steps import StartFrom
from kllm_operator.render.engine import EngineConfig
from kllm_operator.substrate.exceptions import StepRefusedError

P, D = Role.PREFILL, Role.DECODE
SLOT, STARTING, SERVING, FAILED = (
    InstanceState.SLOT, InstanceState.STARTING, InstanceState.SERVING, InstanceState.FAILED,
)  # fmt: skip


async def test_a_slot_is_none_of_its_roles_instances_until_it_is_started(driver):
    name = await driver.substrate.add_slot(D)
    warming = (await seen(driver))[name]
    assert (warming.slot, warming.state, warming.role) == (True, STARTING, D)
    ready = await until(driver, name, SLOT)
    assert ready.slot
    assert belongs_to(driver, name) == ("slot", "chat-decode")
    uid = driver.pod(name)["metadata"]["uid"]

    assert await driver.substrate.start(D, source=StartFrom.SLOT) == name
    assert ((await seen(driver))[name].slot, (await seen(driver))[name].state) == (False, STARTING)
    await until(driver, name, SERVING)
    assert belongs_to(driver, name) == ("decode", "chat-decode")
    assert driver.pod(name)["metadata"]["uid"] == uid
    told = await until(driver, name, SERVING, lambda each: each.phases)
    assert [phase.name for phase in told.phases] == ["engine"]


async def test_a_slot_of_the_other_pool_is_taken_when_its_own_has_none_and_the_pods_are_the_same(driver):
    own, other = await slot(driver, P), await slot(driver, D)
    assert await driver.substrate.start(P, source=StartFrom.SLOT) == own
    assert await driver.substrate.start(P, source=StartFrom.SLOT) == other
    await until(driver, other, SERVING)
    assert belongs_to(driver, other) == ("prefill", "chat-prefill")
    with pytest.raises(StepRefusedError, match="no slot") as refused:
        await driver.substrate.start(P, source=StartFrom.SLOT)
    assert refused.value.reason == "NoSlot"


async def test_two_starts_at_once_take_two_slots(driver):
    slots = {await slot(driver), await slot(driver)}
    starts = (driver.substrate.start(P, source=StartFrom.SLOT) for _ in range(2))
    assert set(await asyncio.gather(*starts)) == slots


async def test_a_slot_of_another_revision_is_not_taken_and_is_told_to_be_outdated(driver):
    name = await slot(driver)
    driver.substrate.use(replace(driver.plan, config=EngineConfig("engine:2")))
    assert (await seen(driver))[name].outdated
    with pytest.raises(StepRefusedError):
        await driver.substrate.start(P, source=StartFrom.SLOT)
    fresh = await slot(driver)
    assert not (await seen(driver))[fresh].outdated
    assert await driver.substrate.start(D, source=StartFrom.SLOT) == fresh
    await driver.substrate.cancel(name)
    assert name not in await seen(driver)


async def test_a_slot_whose_agent_refuses_its_role_has_failed(driver):
    name = await slot(driver)
    driver.ask(name, "refuses")
    await driver.substrate.start(P, source=StartFrom.SLOT)
    assert "it does not take this role" in (await until(driver, name, FAILED)).message


async def test_roles_with_other_pods_share_no_slots_and_do_not_flip(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    unequal = check_service(
        {
            "apiVersion": "kllm.io/v1alpha1", "kind": "InferenceService", "metadata": {"name": "chat"},
            "spec": {
                "model": {"uri": "demo://smollm2-135m", "name": "smollm2"},
                "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
                "decode": {"accelerator": {"count": 2}},
            },
        }
    )  # fmt: skip
    async with drivers.pods(tmp_path, service=unequal) as driver:
        await slot(driver, D)
        with pytest.raises(StepRefusedError):
            await driver.substrate.start(P, source=StartFrom.SLOT)
        name = await serving(driver, P)
        await driver.substrate.drain(name, deadline_seconds=5)
        with pytest.raises(StepRefusedError, match="another pod"):
            await driver.substrate.flip(name, D)
