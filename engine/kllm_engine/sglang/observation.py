"""Reads the state of SGLang's scheduler (0.5.21) into kLLM's messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kllm_engine.messages import Load
from kllm_engine.sglang.fair import set_aside
from kllm_engine.sglang.meter import StepMeter
from kllm_engine.sglang.pacing import PaceTally
from kllm_engine.sglang.park import Committed
from kllm_engine.sglang.tracker import Prefilled, Tracker

MATCHED_TOKENS_ATTRIBUTE = "kllm_matched_tokens"
"""Set on each queued request: prompt tokens that were in the prefix cache on arrival."""

_ROLES: dict[str, Literal["prefill", "decode", "null"]] = {"prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True)
class Meters:
    """Steps of both kinds, and how well they kept their pace."""

    prefill: StepMeter
    decode: StepMeter
    pace: PaceTally


def role_of(scheduler: Any) -> Literal["prefill", "decode", "null"]:
    """What the scheduler does at the moment."""
    return _ROLES.get(scheduler.disaggregation_mode.value, "null")


def prompt_tokens(request: Any) -> int:
    """Length of a request's prompt."""
    return len(request.origin_input_ids)


def prefilled(request: Any, *, now: float) -> Prefilled:
    """Facts of a request whose prefill has just ended."""
    times = request.time_stats
    entered = times.forward_entry_time or now
    arrived = times.scheduler_recv_time or times.prefill_bootstrap_queue_entry_time or entered
    ended = times.prefill_finished_time or now
    return Prefilled(
        rid=request.rid,
        prompt_tokens=prompt_tokens(request),
        cached_tokens=max(0, int(request.cached_tokens)),
        queue_seconds=max(0.0, entered - arrived),
        prefill_seconds=max(0.0, ended - entered),
        since=now,
        bound_at=None if request.pending_bootstrap else now,
    )


def committed(scheduler: Any) -> Committed:
    """What is parked, or admitted to be prefilled without a decode instance."""
    candidates = [*scheduler.disagg_prefill_inflight_queue, *scheduler.waiting_queue, *_launched(scheduler)]
    candidates += _in_progress(scheduler)
    pending = {id(request): request for request in candidates if request.pending_bootstrap}.values()
    return Committed(len(pending), sum(map(prompt_tokens, pending)))


def observe(scheduler: Any, *, meters: Meters, tracker: Tracker, computing: int, parked_limit: int) -> Load:
    """State of the scheduler.

    Args:
        scheduler: SGLang's Scheduler.
        meters: steps so far.
        tracker: prefilled requests.
        computing: requests in the step that is about to run.
        parked_limit: watermark of parked tokens.
    """
    role = role_of(scheduler)
    pool = scheduler.pool_stats_observer.get_pool_stats()
    used, _ = pool.get_kv_token_stats()
    parked = tracker.parked
    common = Load(
        pid=os.getpid(),
        now=time.monotonic(),
        role=role,
        parked_requests=len(parked),
        parked_tokens=sum(request.prompt_tokens for request in parked),
        parked_limit_tokens=parked_limit if role == "prefill" else 0,
        kv_used_tokens=max(0, int(used)),
        kv_evictable_tokens=max(0, int(pool.full_evictable_size)),
        kv_total_tokens=int(scheduler.max_total_num_tokens),
        prefill_step_seconds=meters.prefill.last_seconds,
        decode_step_seconds=meters.decode.mean_seconds,
        prefill_tokens_per_second=meters.prefill.tokens_per_second,
        decode_tokens_per_second=meters.decode.tokens_per_second,
        accept_length=_accept_length(scheduler),
        max_running_requests=int(scheduler.max_running_requests),
        total_prefill_tokens=meters.prefill.total_tokens,
        total_decode_tokens=meters.decode.total_tokens,
        total_prefill_busy_seconds=meters.prefill.total_seconds,
        total_decode_busy_seconds=meters.decode.total_seconds,
        paced_steps=meters.pace.steps,
        late_steps=meters.pace.late_steps,
        late_seconds=meters.pace.late_seconds,
    )
    if role == "decode":
        return _with_decode(common, scheduler)
    return _with_prefill(common, scheduler, computing=computing, transferring=len(tracker.prefilled) - len(parked))


def _accept_length(scheduler: Any) -> float:
    """Tokens per sequence and decode step since the start; 0 without speculative decoding."""
    reporter = scheduler.metrics_reporter
    steps = reporter.spec_total_num_forward_ct
    return float(reporter.spec_total_num_accept_tokens / steps) if steps else 0.0


def _with_prefill(load: Load, scheduler: Any, *, computing: int, transferring: int) -> Load:
    queued = [*scheduler.waiting_queue, *_grammar_queue(scheduler)]
    if load.role == "prefill":
        queued += scheduler.disagg_prefill_bootstrap_queue.queue
    begun = _in_progress(scheduler)
    running = computing or len(scheduler.running_batch.reqs) or len(begun)
    rest = sum(max(0, prompt_tokens(request) - len(request.prefix_indices)) for request in begun)
    tokens = sum(map(prompt_tokens, queued)) + rest
    return _replace(
        load,
        running_requests=running,
        queued_requests=len(queued),
        queued_tokens=tokens,
        queued_uncached_tokens=max(0, tokens - _matched(queued)),
        transferring_requests=transferring,
    )


def _with_decode(load: Load, scheduler: Any) -> Load:
    waiting_for_room = scheduler.disagg_decode_prealloc_queue
    retracted = waiting_for_room.retracted_queue
    queued = [*(entry.req for entry in waiting_for_room.queue), *retracted]
    queued += [*scheduler.waiting_queue, *_grammar_queue(scheduler)]
    return _replace(
        load,
        running_requests=len(scheduler.running_batch.reqs),
        queued_requests=len(queued),
        queued_tokens=sum(map(prompt_tokens, queued)),
        transferring_requests=len(scheduler.disagg_decode_transfer_queue.queue),
        retracted_requests=len(retracted),
    )


def _in_progress(scheduler: Any) -> list[Any]:
    """Prompts that are computed in part."""
    chunked = scheduler.chunked_req
    return [*set_aside(), *([chunked] if chunked is not None else [])]


def _launched(scheduler: Any) -> list[Any]:
    """Requests of batches whose results are still to come, which only overlapped scheduling has."""
    batches = scheduler.result_queue if scheduler.enable_overlap else ()
    return [request for batch, _ in batches for request in batch.reqs]


def _grammar_queue(scheduler: Any) -> list[Any]:
    return list(scheduler.grammar_manager.grammar_queue)


def _matched(requests: Iterable[Any]) -> int:
    return sum(getattr(request, MATCHED_TOKENS_ATTRIBUTE, 0) for request in requests)


def _replace(load: Load, **changes: int) -> Load:
    return msgspec.structs.replace(load, **changes)
