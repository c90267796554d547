"""Looks at an initialised scheduler: makes its reporter, and says what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kllm_engine.messages import (
    AGENT_SOCKET_VARIABLE,
    PACE_VARIABLE,
    PARK_TIMEOUT_VARIABLE,
    PARKED_LIMIT_VARIABLE,
    Hello,
)
from kllm_engine.pace import parse_pace
from kllm_engine.sglang import fair, flip
from kllm_engine.sglang.arguments import DEFAULT_PARK_TIMEOUT_SECONDS
from kllm_engine.sglang.link import AgentLink
from kllm_engine.sglang.observation import role_of
from kllm_engine.sglang.pacing import Pacer, PaceTally
from kllm_engine.sglang.park import ParkLimits
from kllm_engine.sglang.reporter import Reporter, idle_wait

SGLANG_VERSION = "0.5.21"
"""The only one that the hooks were written for."""


@dataclass(frozen=True)
class Equipment:
    """What the plugin gives one scheduler.

    Attributes:
        hello: its introduction to the agent.
        wait: to be called when it waits for others.
        pacer: None where steps are as they are.
    """

    reporter: Reporter
    hello: Hello
    wait: Callable[[], None]
    pacer: Pacer | None


def equip(scheduler: Any, targets: Sequence[str]) -> Equipment:
    """Look at a scheduler and make what the plugin needs for it.

    Args:
        scheduler: SGLang's Scheduler, initialised.
        targets: names of everything that should be hooked.

    Raises:
        ValueError: a limit in the environment is no positive number, or its pace cannot be read.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    limits, hello = look(scheduler, targets)
    parallel = get_parallel()
    # Ranks of one engine hold the same requests: the first one speaks for all.
    speaks = parallel.tp_rank == 0 and parallel.pp_rank == 0 and not parallel.dp_rank
    address = os.environ.get(AGENT_SOCKET_VARIABLE)
    link = AgentLink(Path(address)) if address and speaks else None
    pacer = Pacer(parse_pace(hello.pace)) if hello.pace else None
    reporter = Reporter(
        scheduler,
        link=link,
        limits=limits,
        failed_status=KVPoll.Failed,
        single_rank=parallel.tp_size == 1 and parallel.pp_size == 1,
        tally=pacer.tally if pacer is not None else PaceTally(),
    )
    return Equipment(reporter, hello, idle_wait(lambda: scheduler.ipc_channels.recv_from_tokenizer), pacer)


def look(scheduler: Any, targets: Sequence[str]) -> tuple[ParkLimits, Hello]:
    """What holds for a scheduler in its present role.

    Args:
        scheduler: SGLang's Scheduler, initialised.
        targets: names of everything that should be hooked.

    Raises:
        ValueError: a limit in the environment is no positive number.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415
    from sglang.srt.runtime_context import get_disagg, get_parallel  # noqa: PLC0415

    pool_tokens = int(scheduler.max_total_num_tokens)
    limits = park_limits(os.environ, pool_tokens=pool_tokens, request_slots=_request_slots(scheduler))
    patched: set[str] = HookRegistry._patched
    hello = _hello(
        scheduler,
        limits=limits,
        attempts=int(get_disagg().optimistic_prefill_attempts),
        reserved=int(get_disagg().num_reserved_decode_tokens),
        pipeline=int(get_parallel().pp_size),
        missing=[target for target in targets if target not in patched],
        installed=[target for target in targets if target in patched],
        pace=os.environ.get(PACE_VARIABLE, ""),
    )
    return limits, hello


def park_limits(environment: Mapping[str, str], *, pool_tokens: int, request_slots: int) -> ParkLimits:
    """Limits of parked KV: half of the pool, three quarters of the slots and 120 s, or what the environment says.

    Raises:
        ValueError: a value is no positive number; the message names the variable.
    """
    values: dict[str, float] = {}
    defaults = {PARKED_LIMIT_VARIABLE: max(1, pool_tokens // 2), PARK_TIMEOUT_VARIABLE: DEFAULT_PARK_TIMEOUT_SECONDS}
    for name, default in defaults.items():
        text = environment.get(name, "")
        try:
            values[name] = float(text) if text else default
        except ValueError:
            raise ValueError(f"{name} must be a number, got {text!r}") from None
    return ParkLimits(
        tokens=int(values[PARKED_LIMIT_VARIABLE]),
        requests=max(1, request_slots * 3 // 4),
        seconds=values[PARK_TIMEOUT_VARIABLE],
    )


def _request_slots(scheduler: Any) -> int:
    """How many requests can hold KV here at once."""
    slots = int(scheduler.req_to_token_pool.size)
    if role_of(scheduler) == "prefill":
        return min(slots, int(scheduler.req_to_metadata_buffer_idx_allocator.size))
    return slots


def _hello(
    scheduler: Any,
    *,
    limits: ParkLimits,
    attempts: int,
    reserved: int,
    pipeline: int,
    missing: list[str],
    installed: list[str],
    pace: str,
) -> Hello:
    role = role_of(scheduler)
    version = importlib.metadata.version("sglang")
    pool, context = int(scheduler.max_total_num_tokens), int(scheduler.model_config.context_len)
    problems = [f"hook did not take: {target}; its function is gone or has changed" for target in missing]
    problems += [f"{name} is gone or has changed, which the order of prompts needs" for name in fair.unmet(scheduler)]
    if version != SGLANG_VERSION:
        problems.append(f"SGLang is {version}, the plugin was written for {SGLANG_VERSION}: install that version")
    if role == "decode" and context + reserved > pool:
        problems.append(
            f"the KV pool holds {pool} tokens and a request may need {context} + {reserved} reserved ones; it would "
            "wait for ever: lower context-length, or raise max-total-tokens or mem-fraction-static"
        )
    if pace and scheduler.enable_overlap:
        problems.append("overlapped steps cannot be paced: set disable-overlap-schedule in engine-args, or drop --pace")
    late = role != "prefill" or attempts > 0
    reason = "" if late else "PipelineParallel" if pipeline > 1 else "HierarchicalCachePolicy"
    return Hello(
        pid=os.getpid(),
        now=time.monotonic(),
        engine_version=version,
        role=role,
        page_size=int(scheduler.page_size),
        kv_type=str(scheduler.tp_worker.model_runner.kv_cache_dtype_str),
        optimistic_attempts=attempts,
        binding_reason=reason,
        max_total_num_tokens=pool,
        max_running_requests=int(scheduler.max_running_requests),
        context_tokens=context,
        request_tokens=int(scheduler.max_req_input_len),
        parked_limit_tokens=limits.tokens if role == "prefill" else 0,
        hooks_installed=installed,
        hooks_missing=missing,
        problems=problems,
        pace=pace,
        flip_obstacle=flip.obstacle(scheduler),
    )
