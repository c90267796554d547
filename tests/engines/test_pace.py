"""Paced engines take the model's time, whatever a step really costs, and a long step is no sign of death."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator

import pytest
from bare_fleet import Agent, BareFleet, bare_fleet

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role
from kllm_engine.pace import parse_pace

pytestmark = pytest.mark.engines

SPEC = "prefill=0.05+0.004n,decode=0.06+0.005b"
PACE = parse_pace(SPEC)
LONG_PROMPT = 1500
"""One step of 6 s."""

OVERHEAD_SECONDS = 0.25
"""HTTP, transfer and two cores that others use as well."""


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


@pytest.fixture(scope="module")
async def paced() -> AsyncIterator[tuple[BareFleet, Agent, Agent]]:
    async with bare_fleet() as fleet:
        prefill = await fleet.start("paced-prefill", Role.PREFILL, "--pace", SPEC, **{"chunked-prefill-size": 2048})
        decode = await fleet.start("paced-decode", Role.DECODE, "--pace", SPEC)
        await asyncio.gather(prefill.serving(), decode.serving())
        yield fleet, prefill, decode


async def test_prefill_and_decode_take_the_models_time(paced):
    fleet, prefill, decode = paced
    sides = await prefill.instance(), await decode.instance()
    for length in (16, 100, 250):
        began = time.monotonic()
        await fleet.generate(*sides, prompt(length, length), 1)
        seconds = time.monotonic() - began
        assert PACE.prefill is not None
        assert 0 <= seconds - PACE.prefill.seconds(length) < OVERHEAD_SECONDS
    began = time.monotonic()
    await fleet.generate(*sides, prompt(16, 1), 41)
    seconds = time.monotonic() - began
    assert PACE.prefill is not None
    assert PACE.decode is not None
    expected = PACE.prefill.seconds(16) + 40 * PACE.decode.seconds(1, 0)
    assert expected - PACE.decode.seconds(1, 0) <= seconds < expected * 1.05 + OVERHEAD_SECONDS


async def test_the_pace_and_how_well_it_is_kept_are_told(paced):
    _, prefill, decode = paced
    for agent in (prefill, decode):
        told = (await agent.instance()).pacing
        assert told.startswith(str(PACE))
        late, steps = map(int, re.findall(r"\((\d+) of (\d+) steps late", told)[0])
        assert late <= max(2, steps // 10)


async def test_a_step_of_six_seconds_does_not_look_hung(paced):
    fleet, prefill, decode = paced
    sides = await prefill.instance(), await decode.instance()
    call = asyncio.ensure_future(fleet.generate(*sides, prompt(LONG_PROMPT, 5), 1))
    watch = prefill.watch(100)
    ages = []
    while not call.done():
        report = await watch.read()
        assert report.state == engine_pb2.INSTANCE_STATE_SERVING
        ages.append(report.age_seconds)
    watch.cancel()
    await call
    assert 1.0 < max(ages) < 3.0
