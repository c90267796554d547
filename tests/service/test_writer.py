"""When the status of a service and of its pools is written, in virtual time."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
from types import SimpleNamespace

import pytest
from loop.virtual_time import run_virtually
from service.known import BOTH, facts, report
from service.service_world import service

from kllm_core import labels
from kllm_core.objectives import Role
from kllm_operator.service.writer import StatusWriter

TICK_SECONDS = 5.0


class Told:
    """A service and its pools, the operator that writes their statuses, and how often it did."""

    def __init__(self):
        self.writes = 0
        self.service = {**service(), "metadata": {"name": "chat", "namespace": "default", "uid": "s", "generation": 1}}
        self.pools = {
            role: {
                "apiVersion": labels.API_VERSION, "kind": f"{role.capitalize()}Pool",
                "metadata": {"name": f"chat-{role}", "namespace": "default", "uid": role, "generation": 1},
            }
            for role in Role
        }  # fmt: skip
        self.lead()

    def lead(self):
        """Another replica takes over."""
        cluster = SimpleNamespace(
            api=self, caches=SimpleNamespace(put=lambda document: document),
            now=lambda: dt.datetime(2026, 1, 1, tzinfo=dt.UTC).isoformat(),
        )  # fmt: skip
        self.writer = StatusWriter(cluster, ("default", "chat"), SimpleNamespace(of=self.pools.get))

    async def apply_status(self, document):
        self.writes += 1
        for each in (self.service, *self.pools.values()):
            if each["metadata"]["uid"] == document["metadata"]["uid"]:
                each["status"] = copy.deepcopy(document["status"])
        return document

    async def tick(self, value, seconds=TICK_SECONDS, **more):
        """Ticks of a loop that knows this load, for some time; how often something was written."""
        before = self.writes
        for _ in range(round(seconds / TICK_SECONDS)):
            known = facts(report=report(BOTH, value=value, **more))
            if self.writer.differs(known, self.service):
                await self.writer.write(known, self.service)
            await asyncio.sleep(TICK_SECONDS)
        return self.writes - before

    @property
    def source(self):
        return self.service["status"]["prefill"]["load"]["source"]


@pytest.fixture
def told():
    return Told()


def test_a_new_leader_that_hears_agents_late_writes_nothing(told):
    async def work():
        await told.tick(0.5)
        told.lead()
        assert await told.tick(None, seconds=50.0, reason="LoadUnknown") == 0
        assert await told.tick(0.5, seconds=60.0) == 0

    run_virtually(work())


def test_agents_that_are_silent_for_a_moment_now_and_then_are_nothing_to_write_about(told):
    async def work():
        await told.tick(0.5, seconds=30.0)
        for _ in range(10):
            assert await told.tick(None, seconds=40.0, reason="LoadUnknown") == 0
            assert await told.tick(0.5, seconds=10.0) == 0

    run_virtually(work())


def test_a_silence_that_lasts_is_told_once_and_its_end_too(told):
    async def work():
        await told.tick(0.5, seconds=30.0)
        assert await told.tick(None, seconds=120.0) == 3
        assert told.source == "Unknown"
        assert await told.tick(0.5, seconds=30.0) == 3
        assert told.source == "Predicted"

    run_virtually(work())


def test_what_is_urgent_does_not_wait_for_a_silence(told):
    async def work():
        await told.tick(0.5, seconds=30.0)
        assert await told.tick(None, desired=(2, 1)) == 2
        assert told.service["status"]["prefill"]["desired"] == 2

    run_virtually(work())


def test_loads_that_change_all_the_time_are_told_every_fifteen_seconds(told):
    async def work():
        await told.tick(0.1)
        writes = [await told.tick(step / 10) for step in range(2, 11)]
        assert writes == [0, 0, 3] * 3

    run_virtually(work())
