"""What SGLang (0.5.21) asks of the one prompt in progress, answered for those that are set aside as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from kllm_engine.sglang.fair import abort_soon, set_aside


def prefill_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """A chunk ended of a prompt that has been set aside; SGLang would take it for one that gave its KV up."""
    mine = next((request for request in batch.reqs if request in set_aside()), None)
    if mine is None:
        return original(scheduler, batch, result)
    kept, scheduler.chunked_req = scheduler.chunked_req, mine
    try:
        return original(scheduler, batch, result)
    finally:
        scheduler.chunked_req = kept


def aborted(result: None, scheduler: Any, received: Any) -> None:  # noqa: ARG001
    """A client, or the router, gave requests up."""
    for request in set_aside():
        if received.abort_all or request.rid.startswith(received.rid):
            abort_soon(request)


def fully_idle(result: bool, scheduler: Any, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    """Nothing is idle that has prompts in progress."""
    return result and not set_aside()


def in_flight(result: set[Any], scheduler: Any) -> set[Any]:  # noqa: ARG001
    """Requests that hold KV."""
    return result | set(set_aside())


def pause(original: Callable[..., Any], scheduler: Any, received: Any) -> Any:
    """A pause that takes KV away takes it from those that are set aside too; a prefill instance keeps its prompts."""
    aside = set_aside()
    if aside and received.mode == "retract" and scheduler.disaggregation_mode.value != "prefill":
        last = scheduler.last_batch
        # SGLang takes these from there itself.
        known = {id(request) for request in last.reqs} if last is not None and last.forward_mode.is_extend() else set()
        others = [request for request in aside if id(request) not in known]
        scheduler.running_batch.reqs = [*scheduler.running_batch.reqs, *others]
        aside.clear()
    return original(scheduler, received)


def pending_tokens(result: int, *_: Any, **__: Any) -> int:
    """Tokens that wait for prefill."""
    return result + sum(max(0, int(request.seqlen) - len(request.prefix_indices)) for request in set_aside())


def uncached_sizes(result: tuple[int, int], checker: Any) -> tuple[int, int]:
    """KV that is held and not in the prefix cache: SGLang compares it with the pool."""
    batches = [batch for batch in (checker.get_last_batch(), checker.get_running_batch()) if batch is not None]
    counted = {id(request) for batch in batches for request in batch.reqs}
    held = 0
    for request in set_aside():
        if id(request) not in counted and request.kv.holds_kv:
            pages = -(-request.kv.kv_allocated_len // checker.page_size)
            held += pages * checker.page_size - request.kv.cache_protected_len
    return result[0] + held, result[1]


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PARTS = "sglang.srt.managers.scheduler_components"
_INQUIRER = f"{_PARTS}.load_inquirer.SchedulerLoadInquirer"

TABLE: tuple[tuple[str, Callable[..., Any], Literal["AFTER", "AROUND"]], ...] = (
    (f"{_SCHEDULER}.process_batch_result_disagg_prefill", prefill_result, "AROUND"),
    (f"{_SCHEDULER}.abort_request", aborted, "AFTER"),
    (f"{_SCHEDULER}.is_fully_idle", fully_idle, "AFTER"),
    (f"{_SCHEDULER}.collect_inflight_reqs", in_flight, "AFTER"),
    (f"{_SCHEDULER}.pause_generation", pause, "AROUND"),
    (f"{_INQUIRER}._get_num_pending_tokens", pending_tokens, "AFTER"),
    (f"{_INQUIRER}.get_num_waiting_uncached_tokens", pending_tokens, "AFTER"),
    (f"{_PARTS}.invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes", uncached_sizes, "AFTER"),
)
"""Target, function, kind."""
