"""Gates inside a real engine: a request can be held at an exact stage while a fault is applied.

The gated zygote installs them before it forks. A gate does nothing until a test arms its stage by a file; then the
scheduler that comes there leaves a mark with its instance's name and waits until the file is gone. It waits where it
stands, as in a long step, so that a process that is killed or stopped dies or stops exactly there.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from kllm_engine.messages import AGENT_SOCKET_VARIABLE

FOLDER_VARIABLE = "KLLM_TEST_GATES"
STAGES = ("queue", "prefill", "handshake", "transfer", "first_token", "streaming")
"""Stages with a gate in the engine. `parked` has its gate between agent and router."""

STREAMED_TOKENS = 12
"""Output tokens after which the gate of the stage `streaming` holds."""

_PREFILL_STEP = 2
_POLL_SECONDS = 0.002


def hold_file(folder: Path, stage: str) -> Path:
    """While it is there, the gate of the stage is armed."""
    return folder / f"{stage}.hold"


def mark_file(folder: Path, stage: str, instance: str) -> Path:
    """Says that an instance holds a request at the stage."""
    return folder / f"{stage}.at.{instance}"


def served_file(folder: Path, role: str) -> Path:
    """Names the instance of a role that has had the newest request."""
    return folder / f"served.{role}"


def wait_at(stage: str) -> None:
    """Hold the calling thread here while the stage is armed."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    hold = hold_file(folder, stage)
    if not hold.exists():
        return
    mark_file(folder, stage, _instance()).touch()
    while hold.exists():
        time.sleep(_POLL_SECONDS)


def serves(role: str) -> None:
    """This instance has a new request."""
    served_file(Path(os.environ[FOLDER_VARIABLE]), role).write_text(_instance())


def _instance() -> str:
    return Path(os.environ[AGENT_SOCKET_VARIABLE]).name.removesuffix(".plugin.sock")


def install() -> None:
    """Put all gates into SGLang's classes; once, in the process that the engines are forked from."""
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    decode = importlib.import_module("sglang.srt.disaggregation.decode")
    mooncake = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
    _wrap(scheduler, "ingest_requests", _after_arrival)
    _wrap(scheduler, "run_batch", _before_step)
    _wrap(mooncake.MooncakeKVReceiver, "send_metadata", _before_handshake)
    _wrap(mooncake.MooncakeKVManager, "send_kvcache", _before_transfer)
    _wrap(decode.DecodeTransferQueue, "pop_transferred", _after_transfer)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def gated(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, gated)


def _after_arrival(original: Callable[..., Any], scheduler: Any) -> Any:
    arrived = original(scheduler)
    if _is_prefill(scheduler) and (scheduler.disagg_prefill_bootstrap_queue.queue or scheduler.waiting_queue):
        serves("prefill")
        wait_at("queue")
    return arrived


def _before_step(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    if _is_prefill(scheduler):
        if _step(scheduler, batch) == _PREFILL_STEP:
            wait_at("prefill")
    elif any(len(request.output_ids) >= STREAMED_TOKENS for request in batch.reqs):
        wait_at("streaming")
    return original(scheduler, batch, *arguments, **named)


def _step(scheduler: Any, batch: Any) -> int:
    """Which step of its prompt the first request of a batch is in, from 1."""
    rid = batch.reqs[0].rid if batch.reqs else ""
    before: tuple[str, int] = getattr(scheduler, "kllm_test_prompt", ("", 0))
    step = before[1] + 1 if before[0] == rid else 1
    scheduler.kllm_test_prompt = (rid, step)
    return step


def _before_handshake(original: Callable[..., Any], receiver: Any, *arguments: Any, **named: Any) -> Any:
    serves("decode")
    wait_at("handshake")
    return original(receiver, *arguments, **named)


def _before_transfer(original: Callable[..., Any], manager: Any, *arguments: Any, **named: Any) -> Any:
    wait_at("transfer")
    return original(manager, *arguments, **named)


def _after_transfer(original: Callable[..., Any], queue: Any, *arguments: Any, **named: Any) -> Any:
    transferred = original(queue, *arguments, **named)
    if transferred:
        wait_at("first_token")
    return transferred


def _is_prefill(scheduler: Any) -> bool:
    return bool(scheduler.disaggregation_mode.value == "prefill")
