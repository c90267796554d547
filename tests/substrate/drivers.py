"""One way to drive each substrate for the tests of what all of them promise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from substrate.fake_kubelet import FakeCluster
from substrate.memory_substrate import MemorySubstrate
from substrate.polling import polled
from substrate.substrate_helpers import fake_programs, service

from kllm_core import labels
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_operator.kube.cache import ObjectCache
from kllm_operator.kube.resources import PODS
from kllm_operator.render.engine import EngineConfig
from kllm_operator.render.owner import Owner
from kllm_operator.substrate.instance import Timeouts
from kllm_operator.substrate.kubernetes import PodSubstrate
from kllm_operator.substrate.kubernetes_states import PodTimeouts
from kllm_operator.substrate.kubernetes_store import PodPlan
from kllm_operator.substrate.processes import ProcessSubstrate

TOKEN = "t" * 32


class Memory:
    """Drives the reference."""

    has_slots = True

    def __init__(self):
        self.substrate = MemorySubstrate()

    def next_name(self, role):
        return f"chat-{role}-{self.substrate.made[role]}"

    def ask(self, name, what):
        if what == "busy":
            self.substrate.busy[name] = 1
        else:
            getattr(self.substrate, what).add(name)

    def ask_no_more(self, name, what):
        if what == "busy":
            self.substrate.busy[name] = 0
        else:
            getattr(self.substrate, what).discard(name)

    async def kill(self, name):
        self.substrate.die(name)

    def impatient(self):
        self.substrate.ready_seconds = 0.05

    def nothing_of(self, name):
        return True


class Files:
    """Asks stub agents by files that they look at."""

    def __init__(self, folder: Path):
        self.folder = folder

    def ask(self, name, what):
        (self.folder / f"{name}.{what}").touch()

    def ask_no_more(self, name, what):
        (self.folder / f"{name}.{what}").unlink()


class Processes(Files):
    """Drives processes."""

    has_slots = False

    def __init__(self, substrate, folder):
        super().__init__(folder)
        self.substrate = substrate

    def next_name(self, role):
        return f"chat-{role}-{self.substrate._ordinals[role]}"

    async def kill(self, name):
        os.kill(next(each.pid for each in self.records if each.id == name), signal.SIGKILL)

    def impatient(self):
        self.substrate._timeouts = Timeouts(serving=0.05)

    def nothing_of(self, name):
        return name not in {each.id for each in self.records}

    @property
    def records(self):
        return self.substrate.run.read_state().processes


class Pods(Files):
    """Drives pods, of an API server in memory and a node that runs them as processes.

    Attributes:
        api: the API server.
        cache: what its watch tells.
    """

    has_slots = True

    def __init__(self, api: FakeCluster, folder: Path, **plan):
        super().__init__(folder)
        self.api, self.cache = api, ObjectCache(PODS)
        self.plan = PodPlan(plan.pop("service", service()), plan.pop("config", EngineConfig("engine:1")), owners())
        self.following = 0
        self.substrate = self.leader()
        api.watchers.append(self._watch)

    def leader(self) -> PodSubstrate:
        """A new one, as after a restart of the operator."""
        return PodSubstrate(self.plan, api=self.api, pods=self.cache, token=TOKEN, suffix=self._suffix)

    async def take_over(self):
        """Let another one lead."""
        await self.substrate.close()
        self.substrate = self.leader()
        self.substrate.notice()

    def next_name(self, role=None):
        return f"chat-engine-{self.following:05}"

    async def kill(self, name):
        await polled(lambda: name in self.api.processes)
        self.api.processes[name].kill()

    def impatient(self):
        self.substrate._timeouts = PodTimeouts(serving=0.05)

    def nothing_of(self, name):
        return name not in self.api.names(PODS) and name not in self.api.processes

    def pod(self, name):
        return self.api.one(PODS, name)

    def note(self, name, key, value):
        """Someone else writes an annotation."""
        self.api.change(self.pod(name), lambda pod: pod["metadata"]["annotations"].update({key: value}))

    def _suffix(self):
        self.following += 1
        return f"{self.following - 1:05}"

    def _watch(self, what, document):
        if document["kind"] == "Pod":
            (self.cache.remove if what == "DELETED" else self.cache.put)(document)
            self.substrate.notice()


def owners() -> dict[Role, Owner]:
    """The pools of the service."""
    return {
        role: Owner("kllm.io/v1alpha1", kind, f"chat-{role}", f"uid-of-{role}")
        for role, kind in ((Role.PREFILL, "PrefillPool"), (Role.DECODE, "DecodePool"))
    }


@contextlib.asynccontextmanager
async def memory() -> AsyncIterator[Memory]:
    driver = Memory()
    yield driver
    await driver.substrate.close()


@contextlib.asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Processes]:
    async with ProcessSubstrate(service(), programs=fake_programs()) as substrate:
        await substrate.resolve_model(folder)
        yield Processes(substrate, folder)


@contextlib.asynccontextmanager
async def pods(folder: Path, **plan) -> AsyncIterator[Pods]:
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    api = FakeCluster(token_file=token_file)
    driver = Pods(api, folder, **plan)
    try:
        yield driver
    finally:
        await driver.substrate.close()
        await api.close()


async def seen(driver):
    return {each.id: each for each in await driver.substrate.observe()}


async def until(driver, name, state, also=lambda found: True):
    """Wait for a state, and for what else shall be; None stands for gone."""
    async with asyncio.timeout(20):
        while True:
            found = (await seen(driver)).get(name)
            if (found and found.state) == state and also(found):
                return found
            await asyncio.sleep(0.01)


async def serving(driver, role=Role.PREFILL):
    name = await driver.substrate.start(role)
    await until(driver, name, InstanceState.SERVING)
    return name


async def drained(driver, role=Role.PREFILL):
    name = await serving(driver, role)
    assert await driver.substrate.drain(name, deadline_seconds=5)
    return name


async def slot(driver, role=Role.PREFILL):
    name = await driver.substrate.add_slot(role)
    await until(driver, name, InstanceState.SLOT)
    return name


def belongs_to(driver, name):
    metadata = driver.pod(name)["metadata"]
    (owner,) = metadata["ownerReferences"]
    return metadata["labels"][labels.ROLE], owner["name"]
