"""Simulates what was measured: the same requests, manifest, engines, starts and handovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import truth_table

from kllm.bench.plan import Planned
from kllm.bench.row import Row
from kllm.sim.flights import Flight
from kllm.sim.offered import Offered
from kllm.sim.options import Options
from kllm.sim.run import simulate
from kllm.sim.scenario import Link, PrefillOrder
from kllm_core.kinds.service import InferenceService

_START_SECONDS = 2.0
"""Of instances, where none was started in the measurement."""
Document = dict[str, Any]


class _Flights:
    """Keeps all requests of a simulation."""

    def __init__(self) -> None:
        self.flights: list[Flight] = []

    def arrived(self, flight: Flight) -> None:
        """One has come."""
        self.flights.append(flight)

    def showed(self, flight: Flight) -> None:
        """Its times are read when all is over."""

    def ended(self, flight: Flight) -> None:
        """The same."""


def imitate(
    real: Mapping[str, Any], *, manifest: Mapping[str, Any], engine: Path, policy: str, initial: str,
    knobs: Sequence[str] = (),
) -> Document:  # fmt: skip
    """What the simulator makes of it.

    Args:
        real: `requests`, those `before` them, `lead_seconds` from the first tick of the loop to the load, `handover`,
            and `start_seconds`.
        manifest: of the service.
        engine: file of the engine, as `kllm calibrate` writes it.
        policy: who decides counts.
        initial: counts at the beginning.
        knobs: settings of the policy.

    Returns:
        `requests` and `decisions`, like those of the measurement; what came before the load is left out.
    """
    lead = real["lead_seconds"]
    requests = tuple(
        Planned(index, max(0.0, row["at"] + lead), row["input_tokens"], row["output_tokens"])
        for index, row in enumerate([*real["before"], *real["requests"]])
    )
    options = Options(
        engine=str(engine),
        start_seconds=real["start_seconds"] or _START_SECONDS,
        initial=initial,
        knobs=tuple(knobs),
        prefill_order=PrefillOrder.FAIR,
    )
    service = InferenceService.model_validate(manifest)
    scenario = options.scenario(service, Offered(requests, requests[-1].at, "as measured"), policy)
    handover, heard = real["handover"], _Flights()
    outcome = simulate(
        replace(
            scenario,
            router=replace(scenario.router, hop_seconds=handover["hop_seconds"]),
            link=Link(handover["base_seconds"], handover["seconds_per_token"]),
        ),
        listener=heard,
    )
    decisions = [
        {"at": round(each.at - lead, 1), "desired": dict(each.desired), "reason": each.reason}
        for each in outcome.decisions
    ]
    return {
        "decisions": truth_table.changes(decisions),
        "requests": [
            _compact(
                at=flight.at - lead, sizes=(flight.input_tokens, flight.output_tokens), status=str(flight.status),
                ttft=flight.ttft, tpot=flight.tpot, stages=flight.stages,
            )
            for flight in heard.flights[len(real["before"]) :]
        ],
    }  # fmt: skip


def measured(row: Row) -> Document:
    """A request that was measured, for a file."""
    return _compact(
        at=row.scheduled, sizes=(row.prompt_tokens or row.input_tokens, row.output_tokens), status=str(row.status),
        ttft=row.ttft, tpot=row.tpot, stages=row.stages,
    )  # fmt: skip


def handover(alone: Sequence[Row]) -> dict[str, float]:
    """What messages and transfers take without any load, in seconds.

    Args:
        alone: requests that were sent while nothing else ran; their stages were told.
    """
    told = [(float(row.prompt_tokens or row.input_tokens), row.stages) for row in alone]
    return truth_table.handover([(tokens, stages["queue"], stages["transfer"]) for tokens, stages in told])


def _compact(
    *, at: float, sizes: tuple[int, int], status: str, ttft: float | None, tpot: float | None,
    stages: Mapping[str, float],
) -> Document:  # fmt: skip
    return {
        "at": round(at, 3), "input_tokens": sizes[0], "output_tokens": sizes[1], "status": status,
        "ttft": None if ttft is None else round(ttft, 4),
        "tpot": None if tpot is None else round(tpot, 5),
        "stages": {name: round(stages[name], 4) for name in truth_table.STAGES if name in stages},
    }  # fmt: skip
