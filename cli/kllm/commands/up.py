"""`kllm up`: serve a manifest on this machine until told to stop."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from kllm.bench.exceptions import OptionError
from kllm.bench.files import check_new_file
from kllm.cache import cache_directory
from kllm.controlling import control
from kllm.running import Endpoint, RefusedError, run_until_signalled, up
from kllm.sim.engines import EngineError, engine
from kllm.steps import JsonSteps, Steps, terminal_steps
from kllm_core.kinds.manifest import ManifestError, read_service
from kllm_core.kinds.service import InferenceService
from kllm_core.timing import EngineTiming
from kllm_engine.pace import PaceError, parse_pace
from kllm_operator.history.recorder import Recorder
from kllm_operator.loop.settings import LoopSettings, SettingError
from kllm_operator.service.scaled import with_chunks
from kllm_operator.substrate.exceptions import (
    AlreadyRunningError,
    ChildFailedError,
    RunDirectoryError,
    SubstrateError,
)
from kllm_operator.substrate.programs import RouterAddress


@dataclass(frozen=True)
class Tuning:
    """What a manifest does not say.

    Attributes:
        pace: how long the engines' steps are made to last, or a JSON file that says so; None leaves them as they are.
        tune: settings of the control loop, each as NAME=VALUE.
        engine: a known engine, or the file of one, whose timing the planner begins with; None: the
            manifest's, or a common one.
        record: a new file that all that the loop decides from is written to; None: nothing is recorded.
    """

    pace: str | None = None
    tune: tuple[str, ...] = ()
    engine: str | None = None
    record: Path | None = None

    def canonical_pace(self) -> str | None:
        """The pace as agents take it.

        Raises:
            PaceError: it cannot be read.
        """
        if self.pace is None:
            return None
        try:
            return str(parse_pace(Path(self.pace).read_text("utf-8") if self.pace.endswith(".json") else self.pace))
        except OSError as error:
            raise PaceError(f"{self.pace}: {error.strerror}") from error

    def prior(self) -> EngineTiming | None:
        """Timing that the planner's learning begins with.

        Raises:
            EngineError: there is no such engine.
        """
        return None if self.engine is None else engine(self.engine).timing

    def recorder(self, endpoint: Endpoint) -> contextlib.AbstractContextManager[Recorder | None]:
        """What records, if anything does.

        Raises:
            OSError: the file exists, or cannot be written.
        """
        if self.record is None:
            return contextlib.nullcontext()
        return Recorder(self.record, service=endpoint.service, start_seconds=endpoint.start_seconds)

    def settings(self) -> LoopSettings:
        """Settings of the control loop.

        Raises:
            SettingError: one of them is not known or not possible.
        """
        values = {}
        for text in self.tune:
            name, _, value = text.partition("=")
            try:
                values[name.strip().replace("-", "_")] = float(value)
            except ValueError:
                raise SettingError(f"--tune {text!r} must be NAME=NUMBER") from None
        return LoopSettings().with_values(values)


def run(file: Path, *, address: RouterAddress, cache_dir: Path | None, as_json: bool, tuning: Tuning) -> int:
    """Returns 0 when it was told to stop, 2 when nothing could be started from what was given, 1 for a failure."""
    service = load(file)
    if service is None:
        return 2
    try:
        settings = with_chunks(tuning.settings(), service)
        pace, prior = tuning.canonical_pace(), tuning.prior()
        if tuning.record is not None:
            check_new_file("--record", tuning.record)
    except (SettingError, PaceError, EngineError, OptionError) as error:
        option = "--pace: " if isinstance(error, PaceError) else "--engine: " if isinstance(error, EngineError) else ""
        print(f"kllm: {option}{error}", file=sys.stderr)
        return 2
    steps: Steps = JsonSteps() if as_json else terminal_steps()
    served: list[Endpoint] = []

    async def serve() -> int:
        try:
            async with up(
                service, address=address, cache=cache_directory(cache_dir), steps=steps, pace=pace
            ) as endpoint:
                served.append(endpoint)
                _announce(endpoint, steps)
                with tuning.recorder(endpoint) as recorder:
                    raise await control(
                        endpoint, service, steps=steps, settings=settings, pace=pace, prior=prior, recorder=recorder
                    )
        except (SubstrateError, RefusedError) as error:
            return explain(error)

    status = run_until_signalled(serve())
    return 0 if served and status > 128 else status


def load(file: Path) -> InferenceService | None:
    """Read a manifest; problems are printed, and then there is none."""
    try:
        return read_service(file)
    except ManifestError as error:
        for problem in error.problems:
            print(f"{file}: {problem}", file=sys.stderr)
        return None


def explain(error: SubstrateError | RefusedError) -> int:
    """Print what went wrong and return the exit status for it."""
    print(f"kllm: {error}", file=sys.stderr)
    if isinstance(error, ChildFailedError):
        for line in error.log_tail:
            print(f"  | {line}", file=sys.stderr)
        print(f"kllm: its log: {error.log}", file=sys.stderr)
    if isinstance(error, AlreadyRunningError):
        print("kllm: see it with `kllm status`, stop it with `kllm down`", file=sys.stderr)
    return 2 if isinstance(error, RefusedError | AlreadyRunningError | RunDirectoryError) else 1


def _announce(endpoint: Endpoint, steps: Steps) -> None:
    if isinstance(steps, JsonSteps):
        steps.event("serving", service=endpoint.service, model=endpoint.model, url=endpoint.url, grpc=endpoint.grpc)
        return
    body = json.dumps(
        {"model": endpoint.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )
    print(f"\n{endpoint.model} is served at {endpoint.url}/v1")
    if endpoint.grpc:
        print(f"gRPC is served at {endpoint.grpc}")
    print(f"\n  curl {endpoint.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    print('  kllm chat "What is the capital of France?"\n')
    print("Ctrl-C stops it.", flush=True)
