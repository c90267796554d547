"""`kllm demo`: up, one streamed answer, down, and one line of what was measured."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from kllm.cache import cache_directory
from kllm.chat import ChatError, Measured, Question, Router
from kllm.commands.up import explain, load
from kllm.running import RefusedError, run_until_signalled, up
from kllm.steps import Steps, terminal_steps
from kllm_core.kinds.service import InferenceService
from kllm_operator.substrate.exceptions import SubstrateError
from kllm_operator.substrate.identity import members
from kllm_operator.substrate.programs import RouterAddress

STARTED_VARIABLE = "KLLM_DEMO_STARTED"
"""Seconds since 1970 at which the person began to wait, if that was before this process."""

_QUESTION = Question("What is the capital of France?", max_tokens=48, temperature=0.0)


def run(file: Path, *, cache_dir: Path | None) -> int:
    """Returns 0 when there was an answer and nothing is left running."""
    began = _began()
    service = load(file)
    if service is None:
        return 2
    # A folder of its own: a service of the same name that is up already is none of the demo's business.
    runtime = Path(tempfile.mkdtemp(prefix="kllm-demo-"))
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    measured = Measured()
    status = run_until_signalled(_show(service, cache_directory(cache_dir), measured, terminal_steps()))
    if status != 1:  # a failure has told where its logs are
        shutil.rmtree(runtime, ignore_errors=True)
    if status != 0:
        return status
    print(_summary(measured, elapsed_seconds=time.time() - began), flush=True)
    return 0


async def _show(service: InferenceService, cache: Path, measured: Measured, steps: Steps) -> int:
    run_id = ""
    try:
        async with up(service, address=RouterAddress(port=0), cache=cache, steps=steps) as endpoint:
            state = endpoint.substrate.run.read_state()
            run_id = state.run_id if state else ""
            answer = await _ask(endpoint.url, measured)
    except (SubstrateError, RefusedError) as error:
        return explain(error)
    except ChatError as error:
        print(f"kllm: {error}", file=sys.stderr)
        return 1
    if left := members(run_id, []):
        print(f"kllm: left running: {', '.join(str(process.pid) for process in left)}", file=sys.stderr)
        return 1
    if not answer.strip():
        print("kllm: the answer was empty", file=sys.stderr)
        return 1
    return 0


async def _ask(url: str, measured: Measured) -> str:
    """Stream one answer to standard output; in a thread, so that signals and children are heard meanwhile."""

    def ask() -> str:
        pieces = []
        with Router(url) as router:
            for piece in router.stream(_QUESTION, measured):
                print(piece, end="", flush=True)
                pieces.append(piece)
        return "".join(pieces)

    print(f"\n> {_QUESTION.text}", flush=True)
    try:
        return await asyncio.to_thread(ask)
    finally:
        print("\n", flush=True)


def _summary(measured: Measured, *, elapsed_seconds: float) -> str:
    headers = {name: measured.headers.get(f"x-kllm-{name}", "unknown") for name in ("prefill", "decode", "binding")}
    return (
        f"demo: ttft_ms={(measured.first_at or 0.0) * 1000:.0f} tpot_ms={measured.tpot_seconds * 1000:.1f} "
        f"prefill={headers['prefill']} decode={headers['decode']} binding={headers['binding'].lower()} "
        f"elapsed_s={elapsed_seconds:.1f}"
    )


def _began() -> float:
    try:
        return float(os.environ[STARTED_VARIABLE])
    except (KeyError, ValueError):
        return time.time()
