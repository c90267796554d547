"""`kllm calibrate`: fit the timing model to a running engine."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace

from kllm.bench.client import Client, Target
from kllm.bench.exceptions import BenchError, OptionError
from kllm.bench.files import write_json
from kllm.bench.machine import allow_connections
from kllm.calibration.fit import FitError
from kllm.calibration.probe import Plan, Probe
from kllm.calibration.report import Calibrated
from kllm.calibration.settings import Settings
from kllm.sim.engines import document
from kllm_core.engine_model.spec import EngineSpec


def run(settings: Settings) -> int:
    """Returns 0 with a timing, 1 without, 2 when an option is wrong, 130 when interrupted."""
    try:
        plan = settings.plan()
        settings = settings.with_address()
        allow_connections(max(plan.batches))
        return asyncio.run(calibrate(settings, plan))
    except OptionError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 2
    except (BenchError, FitError) as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kllm: the timing could not be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the measuring, which handles the signal itself
        return 130


async def calibrate(settings: Settings, plan: Plan) -> int:
    """Measure and fit; what was measured before an interruption is fitted, if it is enough.

    Returns:
        0, or 130 when it was interrupted.

    Raises:
        BenchError: a request failed.
        FitError: not enough was measured.
        OSError: the file cannot be written.
    """
    target = Target(
        settings.url or "", model=settings.model, api_key=settings.api_key, timeout=settings.timeout, tells_stages=True
    )  # fmt: skip
    async with Client(target) as client:
        probe = Probe(client, seed=settings.seed, tell=_tell)
        is_whole = await _until_signalled(probe, plan)
    found = Calibrated.of(probe.prefill, probe.decode, chunk_tokens=settings.chunk_tokens)
    if settings.out is not None:
        spec = EngineSpec(found.timing, chunk_tokens=settings.chunk_tokens)
        if settings.kv_tokens is not None:
            spec = replace(spec, kv_tokens=settings.kv_tokens)
        write_json(settings.out, document(spec, calibration=found.notes(model=client.model, address=target.url)))
    print(found.text())
    return 0 if is_whole else 130


async def _until_signalled(probe: Probe, plan: Plan) -> bool:
    """Whether all was measured before SIGINT or SIGTERM."""
    measuring = asyncio.create_task(probe.run(plan))
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, measuring.cancel)
    try:
        await asyncio.wait({measuring})
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    if measuring.cancelled():
        return False
    measuring.result()
    return True


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
