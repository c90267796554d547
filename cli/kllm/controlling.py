"""Keeps a service that is up as its manifest and its load ask for, and tells why."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import structlog

from kllm.running import Endpoint
from kllm.steps import Steps
from kllm_core.authentication import read_token_file
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_core.timing import EngineTiming
from kllm_engine.pace import parse_pace
from kllm_operator.fleet.levels import LevelReport
from kllm_operator.fleet.watch import FleetWatch
from kllm_operator.history.recorder import Recorder
from kllm_operator.loop.control import Control, Scaled
from kllm_operator.loop.counts import MemoryCounts
from kllm_operator.loop.events import Event
from kllm_operator.loop.report import Report
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.service.scaled import scaled_of
from kllm_operator.substrate.exceptions import ChildFailedError
from kllm_operator.substrate.rundir import write_atomically
from kllm_operator.substrate.shared import reachable

_log = structlog.get_logger(__name__)

_ESSENTIAL = ("router", "zygote")
"""Kinds of processes that nothing goes on without."""


async def control(
    endpoint: Endpoint,
    service: InferenceService,
    *,
    steps: Steps,
    settings: LoopSettings,
    pace: str | None,
    prior: EngineTiming | None = None,
    recorder: Recorder | None = None,
) -> ChildFailedError:
    """Run the control loop until a process fails that is no instance; returns that failure.

    Args:
        endpoint: what is up.
        service: its manifest.
        steps: told of every decision.
        settings: of the loop.
        pace: of the engines; None when their steps are as they are.
        prior: timing of such engines, which learning begins with; left out: the manifest's, or a common one.
        recorder: writes down what is decided from; None: nobody does.
    """
    run = endpoint.substrate.run
    hear = recorder.hear if recorder is not None else _forget
    watch = FleetWatch(read_token_file(run.token_file), levels=settings.levels, hear=hear)

    def tell(event: Event) -> None:
        steps.tell(event.name, event.line, event.document())

    def publish(report: Report) -> None:
        document = {"at": round(time.time(), 3), **report.document()}
        try:
            write_atomically(run.control_file, json.dumps(document) + "\n")
        except OSError as error:
            _log.error("StatusNotWritten", path=str(run.control_file), why=error.strerror)
        if recorder is not None:
            recorder.publish(report, complete=watch.forecast(time.monotonic()).complete)

    loop = Control(
        scaled(service, start_seconds=endpoint.start_seconds, pace=pace, prior=prior), endpoint.substrate, watch,
        tell=tell, publish=publish, settings=settings, clock=time.monotonic,
        counts=MemoryCounts({role: service.spec.role(role).min_replicas for role in Role}),
    )  # fmt: skip
    if endpoint.grpc is not None:
        watch.follow_routers([reachable(endpoint.grpc)])
    running = asyncio.ensure_future(loop.run())
    failing = asyncio.ensure_future(endpoint.substrate.failure(*_ESSENTIAL))
    try:
        await asyncio.wait({running, failing}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return await failing
    finally:
        for task in (running, failing):
            task.cancel()
        await asyncio.gather(running, failing, return_exceptions=True)
        await watch.close()


def scaled(
    service: InferenceService, *, start_seconds: float | None, pace: str | None, prior: EngineTiming | None = None
) -> Scaled:
    """What of a manifest the control loop needs.

    Args:
        service: the manifest.
        start_seconds: what the slowest start took so far; None is unknown.
        pace: of the engines.
        prior: timing of such engines, which learning begins with; None: the manifest's, or a common one.
    """
    made = scaled_of(service, timing=_timing(pace), start_seconds=start_seconds)
    return made if prior is None else replace(made, prior=prior)


def _forget(report: LevelReport) -> None:
    """Nobody records."""


def _timing(pace: str | None) -> EngineTiming | None:
    """The engines' timing if steps are made to last as long as a model says."""
    if pace is None:
        return None
    parsed = parse_pace(pace)
    if parsed.prefill is None or parsed.decode is None:
        return None
    return EngineTiming(parsed.prefill, parsed.decode)
