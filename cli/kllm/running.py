"""Bringing a service up on this machine, with every step told; what starts in here ends in here."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kllm import abilities, logs, ports
from kllm.steps import Steps
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.substrate.exceptions import SubstrateError
from kllm_operator.substrate.processes import ProcessSubstrate
from kllm_operator.substrate.programs import RouterAddress
from kllm_router.arguments import ArgumentError, read_keys

T = TypeVar("T")

_READY_SECONDS = 15.0
_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RefusedError(Exception):
    """What was asked for is not possible here; the text says why and what helps. Nothing was started."""


@dataclass(frozen=True)
class Endpoint:
    """A service that is up.

    Attributes:
        grpc: host:port, if the router serves gRPC.
        start_seconds: what the slowest instance took to start; None is unknown.
    """

    service: str
    model: str
    url: str
    grpc: str | None
    substrate: ProcessSubstrate
    start_seconds: float | None = None


@contextlib.asynccontextmanager
async def up(
    service: InferenceService, *, address: RouterAddress, cache: Path, steps: Steps, pace: str | None = None
) -> AsyncIterator[Endpoint]:
    """Start a service and stop it at the end of the context.

    Args:
        service: what is served.
        address: where the router listens.
        cache: where models are kept.
        steps: told of what is done.
        pace: how long the engines' steps are made to last; None leaves them as they are.

    Raises:
        RefusedError: nothing was started.
        SubstrateError: something did not start, or the service is up already.
    """
    if problems := [*abilities.refusals(service), *_address_refusals(address)]:
        raise RefusedError("\nkllm: ".join(problems))
    substrate = ProcessSubstrate(service, pace=pace, observer=lambda name, kind, event: _tell(steps, name, kind, event))
    async with steps:
        try:
            async with substrate:
                _check_ports(address)
                url, seconds = await _started(substrate, service, address=address, cache=cache, steps=steps)
                state = substrate.run.read_state()
                grpc = state.grpc if state else None
                try:
                    yield Endpoint(service.name, service.spec.model.name, url, grpc, substrate, seconds)
                finally:
                    steps.begin("stop", "stopping everything")
        finally:
            steps.done("stop", "everything has stopped")


def run_until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end, or until SIGINT, SIGTERM or SIGHUP cancels it; a second one ends the cleaning up by force.

    Returns:
        What it returned, or 128 plus the signal's number.
    """
    received: list[int] = []
    logs.configure()

    async def guarded() -> int:
        task = asyncio.ensure_future(work)
        with _handled(task, received):
            try:
                return await task
            except asyncio.CancelledError:
                return 128 + received[0] if received else 1

    return asyncio.run(guarded())


@contextlib.contextmanager
def _handled(task: asyncio.Future[int], received: list[int]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def notice(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, notice, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _address_refusals(address: RouterAddress) -> Iterator[str]:
    if address.port and address.port == address.grpc_port:
        yield f"--port and --grpc-port are both {address.port}; they must differ"
    try:
        read_keys(address.api_key_file)
    except ArgumentError as error:
        yield str(error)


def _check_ports(address: RouterAddress) -> None:
    for port, option in ((address.port, "--port"), (address.grpc_port, "--grpc-port")):
        if reason := ports.refusal(address.host, port, option=option):
            raise RefusedError(reason)


async def _started(
    substrate: ProcessSubstrate, service: InferenceService, *, address: RouterAddress, cache: Path, steps: Steps
) -> tuple[str, float | None]:
    for note in abilities.notes(service):
        steps.say(note)
    started = await _unless_one_fails(substrate, _start(substrate, service, address=address, cache=cache, steps=steps))
    substrate.run.update(phase="Serving")
    return started


async def _start(
    substrate: ProcessSubstrate, service: InferenceService, *, address: RouterAddress, cache: Path, steps: Steps
) -> tuple[str, float | None]:
    # Preloading the engine's code takes longest, so it begins before the model is there.
    substrate.preload()
    steps.begin("zygote", "loading the engine's code")
    steps.begin("model", f"making {service.spec.model.uri} available")
    await substrate.resolve_model(cache)
    steps.done("model", "available")
    counts = {Role.PREFILL: service.spec.prefill.min_replicas, Role.DECODE: service.spec.decode.min_replicas}
    ids = [await substrate.start(role) for role, count in counts.items() for _ in range(count)]
    waits = asyncio.gather(*(_serving(substrate, instance, steps) for instance in ids))
    url, seconds = await asyncio.gather(_router(substrate, address, steps), waits)
    await _ready(url)
    return url, max((each for each in seconds if each is not None), default=None)


async def _serving(substrate: ProcessSubstrate, instance: str, steps: Steps) -> float | None:
    """Wait until an instance serves; seconds that it took by its own word."""
    steps.begin(instance, "starting")
    told = (await substrate.serving(instance)).get("seconds")
    steps.done(instance, "serving")
    return float(told) if isinstance(told, int | float) else None


async def _router(substrate: ProcessSubstrate, address: RouterAddress, steps: Steps) -> str:
    steps.begin("router", "starting")
    url = await substrate.start_router(address)
    steps.done("router", f"listening on {url}")
    return url


async def _ready(url: str) -> None:
    """Wait until the router has heard of the instances, so that the first request is not refused."""
    import httpx2  # noqa: PLC0415 - its import takes long, and the engines start meanwhile

    deadline = time.monotonic() + _READY_SECONDS
    async with httpx2.AsyncClient(timeout=_READY_SECONDS, trust_env=False) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.HTTPError):
                if (await client.get(f"{url}/readyz")).is_success:
                    return
            await asyncio.sleep(_POLL_SECONDS)
    raise SubstrateError(f"the router at {url} is not ready {_READY_SECONDS:.0f} s after the engines")


async def _unless_one_fails(substrate: ProcessSubstrate, work: Coroutine[Any, Any, T]) -> T:
    """A failed process is what others then fail from, so the first one is told."""
    started = asyncio.ensure_future(work)
    failed = asyncio.ensure_future(substrate.failure())
    try:
        await asyncio.wait({started, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        return started.result()
    finally:
        failed.cancel()
        started.cancel()
        await asyncio.gather(started, failed, return_exceptions=True)


def _tell(steps: Steps, name: str, kind: str, event: dict[str, Any]) -> None:
    if kind == "zygote" and event["event"] in {"ready", "listening"}:
        steps.done(name, "the engine's code is loaded")
    if event["event"] in {"progress", "phase", "loading"} and (text := event.get("message") or event.get("name")):
        fraction = event.get("fraction")
        share = f" {fraction:.0%}" if isinstance(fraction, int | float) else ""
        steps.note("router" if kind == "router" else name, f"{text}{share}")
