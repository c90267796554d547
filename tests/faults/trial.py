"""One cell of the matrix on a fleet: hold a request at its stage, apply the fault, look what comes."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.cells import HANG_SECONDS, IDLE_SECONDS, Cell, Fault, Outcome, Result, Stage
from faults.gated_fleet import GatedFleet, until
from faults.gated_instance import GatedInstance
from faults.request import Answer, ask, body, judge, prompt

from kllm_core.objectives import Role

_UNBOUND = frozenset({Stage.QUEUE, Stage.PREFILL, Stage.PARKED})
"""Stages at which no decode instance was chosen yet."""


async def run(fleet: GatedFleet, cell: Cell, seed: int) -> Result:
    """Run a cell and make the fleet whole again.

    Args:
        fleet: whole and idle.
        cell: what to do.
        seed: of the prompt; no two cells of a fleet share one.
    """
    request = body(prompt(seed))
    fleet.arm(cell.stage)
    answer = Answer()
    asking = asyncio.ensure_future(ask(fleet.url, request, seconds=HANG_SECONDS, answer=answer))
    holder = await fleet.reached(cell.stage)
    if cell.stage is Stage.STREAMING:
        await until(lambda: _has_text(answer), seconds=10, what=lambda: "text at the client")
    victim = _victim(fleet, cell, holder)
    began = time.monotonic()
    apply(cell.fault, victim)
    fleet.release(cell.stage)
    await asyncio.wait({asking})
    ended = time.monotonic()
    await fleet.heal()
    idle_began = time.monotonic()
    try:
        await fleet.idle(seconds=IDLE_SECONDS)
        idle: float | None = time.monotonic() - idle_began
    except AssertionError as error:
        idle, leak = None, str(error)
    else:
        leak = ""
    expected = await ask(fleet.url, request, seconds=HANG_SECONDS)
    if isinstance(asking.exception(), TimeoutError):
        outcome, message = Outcome.HUNG, f"no end within {HANG_SECONDS:g} seconds"
    else:
        outcome, message = judge(asking.result(), expected)
    return Result(
        cell,
        outcome,
        seconds=ended - began,
        undisturbed_seconds=expected.seconds,
        message=" ".join(filter(None, (message, leak))),
        victim=victim.id,
        idle_seconds=idle,
        descriptors=fleet.router_descriptors(),
    )


async def _has_text(answer: Answer) -> bool:
    return bool(answer.text)


def apply(fault: Fault, victim: GatedInstance) -> None:
    """Do it."""
    match fault:
        case Fault.KILL:
            victim.signal(signal.SIGKILL)
        case Fault.STOP:
            victim.signal(signal.SIGSTOP)
        case Fault.RESET:
            victim.cut()
        case Fault.HALF_OPEN:
            victim.silence()


def _victim(fleet: GatedFleet, cell: Cell, holder: GatedInstance) -> GatedInstance:
    if holder.role is cell.role:
        return holder
    if cell.role is Role.DECODE and cell.stage in _UNBOUND:
        # None is bound yet; whichever is hit, the router must not stumble over it.
        return fleet.of(Role.DECODE)[0]
    return fleet.serving(cell.role)
