"""`kllm up`: serve a manifest on this machine until told to stop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kllm.cache import cache_directory
from kllm.running import Endpoint, RefusedError, run_until_signalled, up
from kllm.steps import JsonSteps, Steps, terminal_steps
from kllm_core.kinds.manifest import ManifestError, read_service
from kllm_core.kinds.service import InferenceService
from kllm_operator.substrate.exceptions import (
    AlreadyRunningError,
    ChildFailedError,
    RunDirectoryError,
    SubstrateError,
)
from kllm_operator.substrate.programs import RouterAddress


def run(file: Path, *, address: RouterAddress, cache_dir: Path | None, as_json: bool) -> int:
    """Returns 0 when it was told to stop, 2 when nothing could be started from what was given, 1 for a failure."""
    service = load(file)
    if service is None:
        return 2
    steps: Steps = JsonSteps() if as_json else terminal_steps()
    served: list[Endpoint] = []
    status = run_until_signalled(_serve(service, address, cache_directory(cache_dir), steps, served))
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


async def _serve(
    service: InferenceService, address: RouterAddress, cache: Path, steps: Steps, served: list[Endpoint]
) -> int:
    try:
        async with up(service, address=address, cache=cache, steps=steps) as endpoint:
            served.append(endpoint)
            _announce(endpoint, steps)
            raise await endpoint.substrate.failure()
    except (SubstrateError, RefusedError) as error:
        return explain(error)


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
