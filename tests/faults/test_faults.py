"""A request whose engine is killed, stopped or cut off at an exact stage is served by another one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from faults import trial
from faults.cells import Cell, Fault, Outcome, Stage, matrix
from faults.gated_fleet import GatedFleet, gated_fleet

from kllm_core.objectives import Role

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

P, D = Role.PREFILL, Role.DECODE
QUICK = (
    Cell(Fault.KILL, Stage.PREFILL, P, 2),
    Cell(Fault.KILL, Stage.HANDSHAKE, D, 2),
    Cell(Fault.KILL, Stage.FIRST_TOKEN, D, 2),
    Cell(Fault.KILL, Stage.STREAMING, D, 2),
    Cell(Fault.STOP, Stage.STREAMING, D, 2),
    Cell(Fault.RESET, Stage.PREFILL, P, 2),
    Cell(Fault.RESET, Stage.STREAMING, D, 2),
    Cell(Fault.HALF_OPEN, Stage.PARKED, P, 2),
    Cell(Fault.HALF_OPEN, Stage.STREAMING, D, 2),
)
"""One of each kind of recovery; `make faults` runs the rest."""


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[GatedFleet]:
    async with gated_fleet(prefill=2, decode=2) as running:
        yield running


@pytest.mark.parametrize("cell", QUICK, ids=str)
async def test_a_request_survives_what_happens_to_one_instance(fleet: GatedFleet, cell: Cell):
    result = await trial.run(fleet, cell, seed=matrix(cell.pairs).index(cell))

    assert result.outcome is Outcome.SUCCESS, f"{result.outcome} after {result.seconds:.1f} s: {result.message}"
    assert result.idle_seconds is not None, result.message
