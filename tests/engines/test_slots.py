"""A slot on a real zygote serves, in either role, what a plain server answers, and switches like any instance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bare_fleet import TOKEN, Agent, BareFleet, bare_fleet
from plain_server import PlainServer, plain_server_in

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role
from kllm_engine.agent.ports import free_ports

pytestmark = pytest.mark.engines

TOKENS = 16
SERVED_SECONDS = 20.0


@dataclass
class Bench:
    """One instance of each role, a plain server, and room for slots."""

    fleet: BareFleet
    partners: dict[Role, Agent]
    plain: PlainServer

    async def check(self, slot: Agent, role: Role) -> None:
        """The slot and an instance of the other role answer as a plain server does."""
        rng = random.Random(3)
        partner = await self.partners[role.other].instance()
        pair = (await slot.instance(), partner) if role is Role.PREFILL else (partner, await slot.instance())
        for length in (40, 300):
            ids = [rng.randrange(10, 500) for _ in range(length)]
            async with asyncio.timeout(SERVED_SECONDS):
                answer = await self.fleet.generate(*pair, ids, TOKENS)
            assert answer["output_ids"] == await self.plain.generate(ids, TOKENS)


@pytest.fixture(scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with bare_fleet() as fleet:
        partners = {role: await fleet.start(f"stays-{role.value}", role) for role in Role}
        await asyncio.gather(*(agent.serving() for agent in partners.values()))
        async with plain_server_in(fleet.run, model=fleet.model, token=fleet.token, context_tokens=4096) as plain:
            yield Bench(fleet, partners, plain)


@pytest.mark.parametrize("role", list(Role))
async def test_a_slot_serves_as_what_it_is_told_and_then_as_the_other(bench: Bench, role: Role):
    http, bootstrap = free_ports(2, rng=random.Random())
    work = bench.fleet.run / f"work-{role.value}"
    slot = await bench.fleet.start_slot(
        f"slot-{role.value}", "--http-port", str(http), "--bootstrap-port", str(bootstrap),
        "--work-dir", str(work), "--forward-engine-log",
    )  # fmt: skip
    report = await slot.becomes(engine_pb2.INSTANCE_STATE_SLOT)
    assert not report.HasField("role")
    (zygote,) = _children(slot.process.pid)
    assert _threads(zygote) == 1

    assert (await slot.assume(role)).state == engine_pb2.INSTANCE_STATE_STARTING
    await slot.serving()

    instance = await slot.instance()
    assert instance.http_address == f"127.0.0.1:{http}"
    assert instance.bootstrap_port == bootstrap
    await bench.check(slot, role)
    assert (await slot.drain()).drained
    await slot.switch(role.other)
    await bench.check(slot, role.other)
    assert _children(slot.process.pid) == [zygote]
    slot.process.terminate()
    assert await asyncio.wait_for(slot.process.wait(), 30) == 0
    log = (bench.fleet.run / f"slot-{role.value}.err").read_text()
    assert "was not loaded beforehand" not in log
    assert "server_args=" in log
    assert TOKEN not in log


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
