"""What a simulation is asked for on the command line, and the scenarios that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kllm.bench.arrivals import Arrivals
from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_file
from kllm.bench.lengths import Lengths, parse_lengths
from kllm.bench.plot import check_plot
from kllm.sim.engines import EngineError, engine
from kllm.sim.laws.base import Bounds, Pool, Setup
from kllm.sim.laws.registry import build
from kllm.sim.offered import Offered, Part, of_ramp, of_trace, parse_ramp, parse_window
from kllm.sim.scenario import (
    SLO,
    PoolSetup,
    PrefillOrder,
    RouterSetup,
    Routing,
    Scenario,
    ScenarioError,
    StartTimes,
)
from kllm.sim.texts import knobs_of, parse_bounds, parse_counts, parse_failures, parse_numbers
from kllm_core.engine_model.spec import EngineSpec
from kllm_core.kinds.base import TransferBackend
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.loop.settings import LoopSettings, SettingError
from kllm_operator.service.scaled import with_chunks

_POOLS = {Pool.PREFILL: Role.PREFILL, Pool.DECODE: Role.DECODE}


@dataclass(frozen=True)
class Options:
    """Options of `kllm simulate`, as they were typed; None was left out."""

    trace: Path | None = None
    ramp: str | None = None
    isl: str | None = None
    osl: str | None = None
    arrivals: Arrivals = Arrivals.POISSON
    window: str | None = None
    limit: int | None = None
    speed: float | None = None
    scale_rate: float | None = None
    one_pool: bool = False
    bounds: str | None = None
    initial: str | None = None
    engine: str | None = None
    decode_engine: str | None = None
    price: str | None = None
    start_seconds: float = 60.0
    slot_seconds: float = 10.0
    start_spread: float = 0.0
    failures: str | None = None
    routing: Routing = Routing.KLLM
    prefill_order: PrefillOrder = PrefillOrder.FCFS
    cold: bool = False
    grace: float = 600.0
    count_from: float = 0.0
    knobs: tuple[str, ...] = ()
    seed: int = 0
    json: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Find what is wrong before anything is read.

        Raises:
            OptionError: an option is wrong.
        """
        self._check_load()
        if self.bounds is not None and not self.one_pool:
            raise OptionError("--bounds", "the manifest has those of both pools; it goes with --pool one")
        if self.decode_engine is not None and self.one_pool:
            raise OptionError("--decode-engine", "with --pool one there is one kind of engine; give --engine")
        for option, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                check_file(option, path)
        if self.plot is not None:
            check_plot(self.plot)

    def offered(self) -> Offered:
        """The requests.

        Raises:
            OptionError: there are none, or an option is wrong.
        """
        inputs, outputs = _lengths("--isl", self.isl), _lengths("--osl", self.osl)
        if self.trace is None:
            if inputs is None or outputs is None:
                raise OptionError("--isl", "--ramp needs --isl and --osl; give tokens")
            steps = parse_ramp(self.ramp or "")
            return of_ramp(steps, kind=self.arrivals, inputs=inputs, outputs=outputs, seed=self.seed)
        begin, end = (0.0, math.inf) if self.window is None else parse_window(self.window)
        part = Part(begin, end, limit=self.limit, speed=self.speed or 1.0, scale=self.scale_rate or 1.0)
        return of_trace(self.trace, part, inputs=inputs, outputs=outputs, seed=self.seed)

    def scenario(self, service: InferenceService, offered: Offered, policy: str) -> Scenario:
        """One run.

        Args:
            service: objectives, bounds, slots and budget.
            offered: the requests.
            policy: who decides counts.

        Raises:
            OptionError: an option is wrong, or does not go with the policy or the manifest.
        """
        knobs = knobs_of(self.knobs, policy)
        try:
            made = Scenario(
                load=offered.requests,
                objectives=service.spec.objectives.objectives(),
                policy=policy,
                pools=self._pools(service),
                gpu_budget=service.spec.gpu_budget,
                starts=StartTimes(
                    self.start_seconds, self.slot_seconds, prepare=self.start_seconds, spread=self.start_spread
                ),
                router=RouterSetup(self.routing, service.spec.router.binding),
                failures=parse_failures(self.failures or "0"),
                knobs={} if policy == SLO else knobs,
                loop=_loop(service, knobs if policy == SLO else {}),
                warm=not self.cold,
                duration=offered.seconds,
                prefill_order=self.prefill_order,
                grace=self.grace,
                count_from=self.count_from,
                seed=self.seed,
            )
        except ScenarioError as error:
            raise OptionError("scenario", str(error)) from error
        if policy != SLO:
            _check_policy(made)
        return made

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def _check_load(self) -> None:
        if (self.trace is None) == (self.ramp is None):
            raise OptionError("--trace", "give either --trace FILE or --ramp RATE:SECONDS,…")
        if self.trace is not None and self.arrivals is not Arrivals.POISSON:
            raise OptionError("--arrivals", "a trace has its own; leave it out")
        for option, value in (
            ("--window", self.window), ("--limit", self.limit), ("--speed", self.speed),
            ("--scale-rate", self.scale_rate),
        ):  # fmt: skip
            if value is not None and self.trace is None:
                raise OptionError(option, "it goes with --trace; leave it out")
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise OptionError(option, f"{value:g} must be a number above 0")

    def _pools(self, service: InferenceService) -> dict[Pool, PoolSetup]:
        prices = None if self.price is None else parse_numbers("--price", self.price, one_pool=self.one_pool)
        initial = None if self.initial is None else parse_counts("--initial", self.initial, one_pool=self.one_pool)
        if self.one_pool:
            pools = {Pool.ONE: self._one_pool(service)}
        else:
            flippable = _is_flippable(service)
            pools = {pool: self._role_pool(service, pool, flippable=flippable) for pool in _POOLS}
        return {
            pool: replace(
                setup,
                price=setup.price if prices is None else prices[place],
                initial=None if initial is None else initial[place],
            )
            for place, (pool, setup) in enumerate(pools.items())
        }

    def _one_pool(self, service: InferenceService) -> PoolSetup:
        """As many instances as both pools of the manifest may have, with the accelerators of decode."""
        spec = service.spec
        least = spec.prefill.min_replicas + spec.decode.min_replicas
        most = spec.prefill.max_replicas + spec.decode.max_replicas
        if self.bounds is not None:
            least, most = parse_bounds(self.bounds)
        made = _engine("--engine", self.engine, service, Role.DECODE)
        accelerator = spec.decode.accelerator
        return PoolSetup(made, least, most, gpus=max(1, accelerator.count), price=accelerator.price_per_gpu_hour)

    def _role_pool(self, service: InferenceService, pool: Pool, *, flippable: bool) -> PoolSetup:
        role = _POOLS[pool]
        spec = service.spec.role(role)
        own = self.decode_engine if pool is Pool.DECODE else None
        made = _engine("--engine" if own is None else "--decode-engine", own or self.engine, service, role)
        can_flip = flippable and self.decode_engine is None
        return PoolSetup(
            replace(made, flippable=can_flip), spec.min_replicas, spec.max_replicas,
            gpus=max(1, spec.accelerator.count), slots=spec.slots, price=spec.accelerator.price_per_gpu_hour,
        )  # fmt: skip


def _loop(service: InferenceService, knobs: Mapping[str, str]) -> LoopSettings:
    numbers = {}
    for name, value in knobs.items():
        try:
            numbers[name] = float(value)
        except ValueError:
            raise OptionError("--set", f"{name} must be a number for {SLO}, got {value!r}") from None
    try:
        return with_chunks(LoopSettings(), service).with_values(numbers)
    except SettingError as error:
        raise OptionError("--set", str(error)) from error


def _check_policy(scenario: Scenario) -> None:
    """See that there is such a law with such knobs, before others have been run for minutes."""
    bounds = {name: Bounds(pool.least, pool.most, pool.gpus) for name, pool in scenario.pools.items()}
    timing = next(iter(scenario.pools.values())).engine.timing
    try:
        build(scenario.policy, Setup(bounds, scenario.objectives, timing), scenario.knobs)
    except ValueError as error:
        raise OptionError(
            "--policy", f"{error} (and {SLO}, kLLM's own)" if "known are" in str(error) else str(error)
        ) from error


def _engine(option: str, name: str | None, service: InferenceService, role: Role) -> EngineSpec:
    """The engine with what the manifest says of its arguments."""
    try:
        made = _told_engine(service) if name is None else engine(name)
    except EngineError as error:
        raise OptionError(option, str(error)) from error
    given = service.spec.role(role).engine_args
    chunk, running = _count(given.get("chunked-prefill-size")), _count(given.get("max-running-requests"))
    return replace(made, chunk_tokens=chunk or made.chunk_tokens, max_running=running or made.max_running)


def _told_engine(service: InferenceService) -> EngineSpec:
    """The engine whose timing the manifest tells, or a common one."""
    common = engine("prior")
    return common if service.timing is None else replace(common, timing=service.timing)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_flippable(service: InferenceService) -> bool:
    """Whether engines of both roles can change into one another; see docs/engine.md."""
    spec = service.spec
    hardware = {(each.accelerator.resource_name, each.accelerator.count) for each in (spec.prefill, spec.decode)}
    alike = spec.prefill.parallelism == spec.decode.parallelism and len(hardware) == 1
    parts = spec.decode.parallelism
    plain = parts.data == parts.pipeline == parts.expert == parts.context == 1
    return alike and plain and spec.transfer_backend is TransferBackend.MOONCAKE


def _lengths(option: str, text: str | None) -> Lengths | None:
    try:
        return None if text is None else parse_lengths(text)
    except ValueError as error:
        raise OptionError(option, str(error)) from error
