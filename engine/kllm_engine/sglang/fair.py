"""Fair chunked prefill in SGLang's scheduler (0.5.21): several prompts in progress, of which each step continues one.

SGLang goes on with its one `chunked_req` until the prompt is done, and admits nobody meanwhile. Here a prompt that
gives way is set aside between two chunks: it keeps its slot, its KV, and the lock on its prefix that SGLang took after
the last chunk. To go on it becomes `chunked_req` again.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kllm_engine.messages import PREFILL_ORDER_VARIABLE
from kllm_engine.policy.fair_prefill import FairPrefill, Prompt, Turn

_log = logging.getLogger(__name__)

_NUMBER_ATTRIBUTE = "kllm_arrival_number"
_CACHED_ATTRIBUTE = "kllm_cached_on_arrival"


@dataclass
class FairScheduling:
    """What is remembered between the steps of one scheduler.

    Attributes:
        policy: decides who enters the next step.
        aside: prompts in progress besides `chunked_req`, in order of arrival.
        aborted: those of them that were aborted since the last step.
        limit: new tokens of `chunked_req` in the step that is being formed; None: no limit.
        forming: a step is being formed.
    """

    policy: FairPrefill
    aside: list[Any] = field(default_factory=list)
    aborted: list[Any] = field(default_factory=list)
    limit: int | None = None
    forming: bool = False
    arrivals: int = 0

    def number(self, request: Any) -> int:
        """Its place in the order of arrival; one that is pushed back keeps it."""
        if not hasattr(request, _NUMBER_ATTRIBUTE):
            self.arrivals += 1
            setattr(request, _NUMBER_ATTRIBUTE, self.arrivals)
        return int(getattr(request, _NUMBER_ATTRIBUTE))

    def set_aside(self, request: Any) -> None:
        """It keeps what it has, and waits for its turn."""
        request.__dict__.pop(_CACHED_ATTRIBUTE, None)
        self.aside.append(request)
        self.aside.sort(key=self.number)


_state: FairScheduling | None = None
"""Of this process's scheduler; None: SGLang's own order."""


def install(scheduler: Any) -> str:
    """Begin to order a scheduler's prompts, or not.

    Returns:
        Why not; empty when it does.

    Raises:
        ValueError: the environment names an order that does not exist.
    """
    global _state  # noqa: PLW0603  a scheduler's helpers are frozen and have no way to it
    reason = obstacle(scheduler)
    _state = None if reason else _new(scheduler)
    if reason:
        _log.info("prompts are computed in SGLang's order: %s", reason)
    return reason


def wanted_order() -> str:
    """The order that the environment names: fair or fcfs.

    Raises:
        ValueError: it does not exist.
    """
    order = os.environ.get(PREFILL_ORDER_VARIABLE, "fair")
    if order not in {"fair", "fcfs"}:
        raise ValueError(f"{PREFILL_ORDER_VARIABLE} must be fair or fcfs, got {order!r}")
    return order


def obstacle(scheduler: Any) -> str:
    """Why prompts are computed in SGLang's own order; empty when they are not.

    Raises:
        ValueError: the environment names an order that does not exist.
    """
    from sglang.srt.runtime_context import get_parallel, get_schedule  # noqa: PLC0415

    # Each of these counts on one prompt in progress, has an order of its own, or lets decoding take the KV that a
    # prompt set aside will need.
    obstacles = {
        "it was asked for": wanted_order() == "fcfs",
        "prompts are not computed in chunks": not scheduler.chunked_prefill_size or scheduler.chunked_prefill_size < 0,
        f"schedule-policy is {get_schedule().schedule_policy}": get_schedule().schedule_policy != "fcfs",
        "requests have priorities": scheduler.enable_priority_scheduling,
        "chunks are mixed with decoding": scheduler.is_mixed_chunk,
        "the engine is a pipeline": get_parallel().pp_size > 1,
        "the model generates by diffusion": scheduler.dllm_config is not None,
        "attention has a sliding window": scheduler.is_hybrid_swa,
        "the model has recurrent state": scheduler.tree_cache.supports_mamba(),
        "KV is sparse": scheduler.enable_hisparse,
        "chunks end at multiples of truncation_align_size": scheduler.truncation_align_size is not None,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def unmet(scheduler: Any) -> list[str]:
    """What this module needs of SGLang and does not find; a hook that took is not enough."""
    from sglang.srt.managers.schedule_policy import PrefillAdder  # noqa: PLC0415

    wanted = (
        "chunked_req", "_pending_chunked_abort_req", "waiting_queue", "running_batch", "chunked_prefill_size",
        "truncation_align_size", "enable_hisparse", "is_hybrid_swa", "dllm_config",
    )  # fmt: skip
    missing = [f"Scheduler.{name}" for name in wanted if not hasattr(scheduler, name)]
    parameters = {
        "add_one_req": {"has_chunked_req"},
        "_select_prefill_admission": {"has_chunked_req"},
        "add_chunked_req": {"req"},
    }
    for method, names in parameters.items():
        if not names <= set(inspect.signature(getattr(PrefillAdder, method)).parameters):
            missing.append(f"PrefillAdder.{method}({', '.join(sorted(names))})")
    return missing


def _new(scheduler: Any) -> FairScheduling:
    page = int(scheduler.page_size)
    chunk = max(page, int(scheduler.chunked_prefill_size))
    policy = FairPrefill.of_pool(int(scheduler.max_total_num_tokens), chunk_tokens=chunk, page_tokens=page)
    return FairScheduling(policy)


def set_aside() -> list[Any]:
    """Prompts in progress besides `chunked_req`."""
    return _state.aside if _state is not None else []


def abort_soon(request: Any) -> None:
    """End a prompt that is set aside before the next step."""
    if _state is not None and request not in _state.aborted:
        _state.aborted.append(request)


def form_step(original: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    """Who enters the next prefill step: SGLang forms it of those that the policy chose."""
    state = _state
    if state is None:
        return original(scheduler, *arguments, **named)
    _end_aborted(state, scheduler)
    if scheduler.chunked_req is not None:
        state.set_aside(scheduler.chunked_req)
        scheduler.chunked_req = None
    if not state.aside and not scheduler.waiting_queue:
        return original(scheduler, *arguments, **named)
    turn, requests = _turn(state, scheduler)
    with _offered(state, scheduler, turn, requests):
        result = original(scheduler, *arguments, **named)
    if result[0] is None and state.aside:
        # Nobody could begin for want of room, which those in progress give back when they end.
        with _offered(state, scheduler, _alone(state), {}):
            result = original(scheduler, *arguments, **named)
    return result


def _turn(state: FairScheduling, scheduler: Any) -> tuple[Turn, dict[str, Any]]:
    begun = {id(request) for request in state.aside}
    known = sorted([*state.aside, *scheduler.waiting_queue], key=state.number)
    requests = {_key(state, request): request for request in known}
    prompts = []
    for key, request in requests.items():
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        in_progress = id(request) in begun
        done = len(request.prefix_indices) if in_progress else _cached(scheduler, request)
        prompts.append(Prompt(key, tokens, max(1, tokens - done), in_progress))
    return state.policy.turn(prompts), requests


def _alone(state: FairScheduling) -> Turn:
    return Turn((), _key(state, state.aside[0]), state.policy.chunk_tokens, "OnlyLong", "nobody else can enter")


@contextmanager
def _offered(state: FairScheduling, scheduler: Any, turn: Turn, requests: dict[str, Any]) -> Iterator[None]:
    """Show SGLang only those that shall enter, and put the others back afterwards."""
    aside = {_key(state, request): request for request in state.aside}
    chosen = [*turn.whole, *([turn.part] if turn.part is not None else [])]
    going_on = next((aside[key] for key in chosen if key in aside), None)
    waiting = list(scheduler.waiting_queue)
    offered = [requests[key] for key in chosen if key not in aside]
    if going_on is not None and _room(scheduler) >= state.policy.page_tokens:
        state.aside.remove(going_on)
        scheduler.chunked_req = going_on
    state.limit = turn.part_tokens if turn.part in aside else None
    state.forming = True
    scheduler.waiting_queue = list(offered)
    try:
        yield
    finally:
        state.forming, state.limit = False, None
        _put_back(scheduler, waiting, offered)
    left = scheduler.chunked_req
    if going_on is not None and left is going_on and going_on.extend_range.end <= len(going_on.prefix_indices):
        # No step was formed, and SGLang would take it for one of which a chunk was computed.
        scheduler.chunked_req = None
        state.set_aside(going_on)


def _room(scheduler: Any) -> int:
    """Tokens of KV that the next chunk can take; a page is left for the allocator's rounding."""
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return int(free) - int(scheduler.page_size)


def _put_back(scheduler: Any, waiting: list[Any], offered: list[Any]) -> None:
    left = {id(request) for request in scheduler.waiting_queue}
    taken = {id(request) for request in offered} - left
    known = {id(request) for request in waiting}
    arrived = [request for request in scheduler.waiting_queue if id(request) not in known]
    scheduler.waiting_queue = [request for request in waiting if id(request) not in taken] + arrived


def _key(state: FairScheduling, request: Any) -> str:
    return f"{state.number(request)}/{request.rid}"


def _cached(scheduler: Any, request: Any) -> int:
    """Prompt tokens that were in the prefix cache when it was first seen here; looking costs time with its length."""
    if not hasattr(request, _CACHED_ATTRIBUTE):
        from sglang.srt.managers.schedule_policy import match_prefix_for_req  # noqa: PLC0415

        match_prefix_for_req(scheduler.tree_cache, request, include_req=True)
        setattr(request, _CACHED_ATTRIBUTE, int(request.num_matched_prefix_tokens))
    return int(getattr(request, _CACHED_ATTRIBUTE))


def _end_aborted(state: FairScheduling, scheduler: Any) -> None:
    for request in state.aborted:
        if request not in state.aside:
            continue
        state.aside.remove(request)
        # SGLang's own way to end a prompt between two chunks, which looks at these two.
        kept = scheduler.chunked_req, scheduler._pending_chunked_abort_req
        scheduler.chunked_req = scheduler._pending_chunked_abort_req = request
        try:
            scheduler.process_pending_chunked_abort()
        finally:
            scheduler.chunked_req, scheduler._pending_chunked_abort_req = kept
    state.aborted.clear()


def new_adder(result: None, adder: Any, *_: Any, **__: Any) -> None:  # noqa: ARG001
    """Room that prompts in progress will need is not there for others."""
    if _state is not None and _state.forming:
        adder.memory_budget.total_offset += sum(_rest_in_pages(adder, request) for request in _state.aside)


def go_on(original: Callable[..., Any], adder: Any, request: Any) -> Any:
    """The next chunk of a prompt in progress, as long as its turn allows and the room that there is."""
    if _state is None or not _state.forming:
        return original(adder, request)
    budget, page = adder.memory_budget, adder.page_size
    # Room that others in progress will need must not keep this one from going on.
    others, budget.total_offset = budget.total_offset, 0
    room = min(int(budget.remaining_total) - page, _state.limit or adder.rem_chunk_tokens)
    adder.chunked_req_limit = max(page, room // page * page)
    truncated = original(adder, request)
    budget.total_offset += others
    if truncated is not None:
        after = len(request.full_untruncated_fill_ids) - request.extend_range.end
        budget.total_offset += adder.ceil_paged_tokens(after)
    return truncated


def admit(
    original: Callable[..., Any], adder: Any, request: Any, has_chunked_req: bool, *arguments: Any, **named: Any
) -> Any:
    """SGLang tracks one prompt in progress: beside it others enter as a whole or not."""
    if _state is not None and _state.forming and has_chunked_req and adder.rem_chunk_tokens is not None:
        from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: PLC0415

        rest = len(request.full_untruncated_fill_ids) - len(request.prefix_indices) - request.host_hit_length
        if adder.ceil_paged_tokens(rest) > adder.rem_chunk_tokens:
            return AddReqResult.OTHER
    return original(adder, request, has_chunked_req, *arguments, **named)


def select(original: Callable[..., Any], adder: Any, request: Any, **named: Any) -> Any:
    """The same where KV that was promised by the second tier did not come."""
    admission = original(adder, request, **named)
    if (
        _state is not None
        and _state.forming
        and named.get("has_chunked_req")
        and getattr(admission, "is_chunked", False)
    ):
        from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: PLC0415

        return AddReqResult.OTHER
    return admission


def _rest_in_pages(adder: Any, request: Any) -> int:
    tokens = len(request.origin_input_ids) + len(request.output_ids) - len(request.prefix_indices)
    return int(adder.ceil_paged_tokens(max(0, tokens)))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

TABLE: tuple[tuple[str, Callable[..., Any], Literal["AFTER", "AROUND"]], ...] = (
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", form_step, "AROUND"),
    (f"{_ADDER}.__init__", new_adder, "AFTER"),
    (f"{_ADDER}.add_chunked_req", go_on, "AROUND"),
    (f"{_ADDER}.add_one_req", admit, "AROUND"),
    (f"{_ADDER}._select_prefill_admission", select, "AROUND"),
)
"""Target, function, kind."""
