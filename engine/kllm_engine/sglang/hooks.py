"""The functions that are hooked into SGLang (0.5.21), and the table that says where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

from kllm_engine.messages import AGENT_SOCKET_VARIABLE, PREFIX_TREE_VARIABLE
from kllm_engine.sglang import aside, fair, priming, resume
from kllm_engine.sglang.flip import forget_moved_peer, keep_shared_storage, misdirected
from kllm_engine.sglang.observation import MATCHED_TOKENS_ATTRIBUTE
from kllm_engine.sglang.reporter import Reporter
from kllm_engine.sglang.selfcheck import equip, look
from kllm_engine.sglang.tokenizers import shared_tokenizer
from kllm_engine.sglang.tracker import Outcome

_REPORTER_ATTRIBUTE = "kllm_reporter"
_WAIT_ATTRIBUTE = "kllm_idle_wait"
_PACER_ATTRIBUTE = "kllm_pacer"
_CLIENT_ABORT = "AbortReq"

_SENDER = "sglang.srt.disaggregation.common.conn.CommonKVSender"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_RECEIVER = "sglang.srt.disaggregation.common.conn.CommonKVReceiver"
_SWITCH = "sglang.srt.disaggregation.role_switch"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"


def _reporter(scheduler: Any) -> Reporter:
    reporter: Reporter = getattr(scheduler, _REPORTER_ATTRIBUTE)
    return reporter


def run_event_loop(original: Callable[[Any], None], scheduler: Any) -> None:
    """The scheduler is initialised: introduce it, then let it run."""
    equipment = equip(scheduler, _targets())
    setattr(scheduler, _REPORTER_ATTRIBUTE, equipment.reporter)
    setattr(scheduler, _WAIT_ATTRIBUTE, equipment.wait)
    setattr(scheduler, _PACER_ATTRIBUTE, equipment.pacer)
    fair.install(scheduler)
    equipment.reporter.start(equipment.hello)
    original(scheduler)


def role_switched(result: Any, scheduler: Any, *_: Any) -> None:
    """The scheduler serves the other role from now on, or has refused to."""
    if result.success and result.old_role != result.new_role:
        limits, hello = look(scheduler, _targets())
        fair.install(scheduler)
        _reporter(scheduler).begin_again(hello, limits)


def add_request(original: Callable[..., None], scheduler: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """A request that was meant for the role before a switch would wait for minutes."""
    reason = "" if request.is_retracted else misdirected(scheduler, request)
    if not reason:
        original(scheduler, request, *arguments, **named)
        return
    from sglang.srt.disaggregation.utils import prepare_abort  # noqa: PLC0415

    prepare_abort(request, reason, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def ingest_requests(original: Callable[[Any], Any], scheduler: Any) -> Any:
    """Each iteration of every event loop begins here."""
    _reporter(scheduler).iteration()
    return original(scheduler)


def on_idle(original: Callable[[Any], None], scheduler: Any) -> None:
    """No batch can run. A truly idle scheduler reports and sleeps; one that waits for others must not spin."""
    idle = scheduler.is_fully_idle()
    if idle:
        _reporter(scheduler).publish()
    original(scheduler)
    if not idle:
        getattr(scheduler, _WAIT_ATTRIBUTE)()


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    """A step begins."""
    _reporter(scheduler).step_begins(batch)
    pacer = getattr(scheduler, _PACER_ATTRIBUTE)
    if pacer is None:
        return original(scheduler, batch, *arguments, **named)
    # The flag is cleared by the original.
    after_idle = scheduler._sched_idled
    return pacer.step(batch, after_idle=after_idle, compute=lambda: original(scheduler, batch, *arguments, **named))


def process_batch_result(original: Callable[[Any, Any, Any], None], scheduler: Any, batch: Any, result: Any) -> None:
    """A step ended; its batch is emptied by the original, so that it is read before."""
    mode = batch.forward_mode
    size = len(batch.reqs)
    if mode.is_decode() or mode.is_target_verify():
        original(scheduler, batch, result)
        # Accepted drafts are counted by the original.
        tokens = int(result.get_num_generated_tokens(size))
        _reporter(scheduler).step_ended(batch, tokens=tokens, prefill=False)
        return
    tokens = int(batch.extend_num_tokens or 0) if mode.is_extend_without_speculative() else 0
    original(scheduler, batch, result)
    if tokens:
        _reporter(scheduler).step_ended(batch, tokens=tokens, prefill=True)


def prefill_result(result: None, scheduler: Any, batch: Any, *_: Any) -> None:  # noqa: ARG001
    """Requests of the batch that are in flight now have complete KV."""
    in_flight = {id(request) for request in scheduler.disagg_prefill_inflight_queue}
    done = [request for request in batch.reqs if id(request) in in_flight]
    if done:
        _reporter(scheduler).requests_prefilled(done)


def inflight_queue(original: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    """Requests that were bound, or have left, in this pass."""
    before = list(scheduler.disagg_prefill_inflight_queue)
    finished = original(scheduler, *arguments, **named)
    if not before:
        return finished
    reporter = _reporter(scheduler)
    left = {id(request) for request in scheduler.disagg_prefill_inflight_queue}
    for request in before:
        if id(request) in left:
            if not request.pending_bootstrap:
                reporter.request_bound(request)
            continue
        outcome, message = _outcome(request)
        if outcome != "Transferred":
            reporter.give_up(request, message)
        reporter.request_left(request, outcome, message)
    return finished


def bootstrap_failure(result: None, scheduler: Any, request: Any) -> None:  # noqa: ARG001
    """A request without a decode instance was aborted; parked ones are told by the in-flight queue."""
    reporter = _reporter(scheduler)
    outcome, message = _outcome(request)
    reporter.give_up(request, message)
    if request.rid not in reporter.tracker.prefilled:
        reporter.request_failed(request, "Aborted" if outcome == "Aborted" else "BootstrapFailed", message)


def aborted_waiting(result: None, scheduler: Any, request: Any) -> None:  # noqa: ARG001
    """A request was aborted before its first step."""
    _aborted(scheduler, request)


def aborted_computing(result: bool, scheduler: Any, request: Any) -> None:
    """A request was aborted while it was computed; False means that something else had ended it before."""
    if result:
        _aborted(scheduler, request)


def pending_chunked_abort(original: Callable[[Any], None], scheduler: Any) -> None:
    """A request that is computed in chunks is aborted between two of them."""
    request = scheduler._pending_chunked_abort_req
    chunked = request is not None and scheduler.chunked_req is request
    original(scheduler)
    if chunked and scheduler.disaggregation_mode.value == "prefill":
        _aborted(scheduler, request)


def aborted_sender(result: None, sender: Any) -> None:  # noqa: ARG001
    """This instance gave a transfer up: a decode instance that waits for it would else wait for minutes."""
    from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415

    manager = sender.kv_mgr
    manager.send_kv_status_message(
        targets=manager._room_notify_targets(sender.bootstrap_room),
        bootstrap_room=sender.bootstrap_room,
        status=KVPoll.Failed,
        failure_reason="the prefill instance aborted the request",
    )


def requeued(result: None, scheduler: Any, request: Any) -> None:  # noqa: ARG001
    """A prompt was pushed back, to be computed again or to wait for its decode instance."""
    _reporter(scheduler).request_requeued(request)


def created_sender(result: bool, queue: Any, request: Any, *_: Any) -> None:
    """A request arrived on a prefill instance; False means that it is longer than the KV pool and was refused."""
    reporter = _reporter(queue.scheduler)
    if not result:
        reporter.request_failed(request, "TooLong", f"the prompt exceeds {queue.max_total_num_tokens} tokens of KV")
        return
    reporter.rooms.forget(request.bootstrap_room)
    setattr(request, MATCHED_TOKENS_ATTRIBUTE, _cached_tokens(queue.scheduler.tree_cache, request))


def pop_bootstrapped(original: Callable[..., Any], queue: Any, *arguments: Any, **named: Any) -> Any:
    """Requests without a decode instance are admitted only below the watermark; bound ones go on.

    The original compares each pending request's attempts with the allowed ones. For those that must wait the attempts
    look used up for the time of the call: who is bound is decided inside, by all ranks together.
    """
    held = queue.queue[_reporter(queue.scheduler).admitted_without_decode(queue.queue) :]
    attempts = [request.prefill_attempt_count for request in held]
    for request in held:
        request.prefill_attempt_count = sys.maxsize
    try:
        return original(queue, *arguments, **named)
    finally:
        for request, count in zip(held, attempts, strict=True):
            request.prefill_attempt_count = count


def load_snapshot_file(original: Callable[[str], str], name: str) -> str:
    """SGLang's processes share loads in a file that they leave behind; beside the agent's socket it is cleaned up."""
    agent_socket = os.environ.get(AGENT_SOCKET_VARIABLE)
    return original(name) if agent_socket is None else f"{agent_socket}.loads"


def _targets() -> list[str]:
    return list(dict.fromkeys(target for target, _, _ in table()))


def _aborted(scheduler: Any, request: Any) -> None:
    reporter = _reporter(scheduler)
    reporter.give_up(request, "the request was aborted")
    reporter.request_failed(request, *reporter.abort_reason(request))


def _outcome(request: Any) -> tuple[Outcome, str]:
    reason = request.finished_reason
    message = str(getattr(reason, "message", "") or "")
    if type(reason).__name__ != "FINISH_ABORT":
        return "Transferred", ""
    return ("Aborted" if _CLIENT_ABORT in message else "TransferFailed"), message


def _cached_tokens(tree_cache: Any, request: Any) -> int:
    from sglang.srt.managers.schedule_policy import MatchPrefixParams, RadixKey  # noqa: PLC0415

    key = RadixKey(token_ids=request.origin_input_ids, extra_key=request.extra_key, cache_salt=request.cache_salt)
    return len(tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices)


Hook = tuple[str, Callable[..., Any], Literal["AFTER", "AROUND"]]
"""Target, function, kind."""


def table() -> tuple[Hook, ...]:
    """All hooks. A target that cannot be hooked is a reason to refuse service.

    Raises:
        ValueError: the environment names a prefix tree that does not exist.
    """
    tree = os.environ.get(PREFIX_TREE_VARIABLE, "stock")
    if tree not in {"stock", "incremental"}:
        raise ValueError(f"{PREFIX_TREE_VARIABLE} must be stock or incremental, got {tree!r}")
    if tree == "stock":
        return TABLE
    # It inherits from SGLang's tree, so that SGLang is imported with it.
    from kllm_engine.sglang import prefix_tree  # noqa: PLC0415

    prefix_tree.register()
    return (*TABLE, *prefix_tree.TABLE)


TABLE: tuple[Hook, ...] = (
    (f"{_SCHEDULER}.run_event_loop", run_event_loop, "AROUND"),
    (f"{_SCHEDULER}.ingest_requests", ingest_requests, "AROUND"),
    (f"{_SCHEDULER}.on_idle", on_idle, "AROUND"),
    (f"{_SCHEDULER}.run_batch", run_batch, "AROUND"),
    (f"{_SCHEDULER}.process_batch_result", process_batch_result, "AROUND"),
    (f"{_SCHEDULER}.process_batch_result_disagg_prefill", prefill_result, "AFTER"),
    (f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", inflight_queue, "AROUND"),
    (f"{_SCHEDULER}.handle_bootstrap_failure", bootstrap_failure, "AFTER"),
    (f"{_SCHEDULER}.release_aborted_prefill_waiting_req", aborted_waiting, "AFTER"),
    (f"{_SCHEDULER}._retire_aborted_prefill_result", aborted_computing, "AFTER"),
    (f"{_SCHEDULER}.process_pending_chunked_abort", pending_chunked_abort, "AROUND"),
    (f"{_SCHEDULER}.optimistic_release_and_requeue", requeued, "AFTER"),
    (f"{_SCHEDULER}._add_request_to_queue", add_request, "AROUND"),
    (f"{_SWITCH}.handle_pd_role_switch", role_switched, "AFTER"),
    (f"{_SWITCH}._release_prefix_cache_for_role_switch", keep_shared_storage, "AROUND"),
    (f"{_RECEIVER}._setup_bootstrap_infos", forget_moved_peer, "AROUND"),
    (f"{_SENDER}.abort", aborted_sender, "AFTER"),
    (f"{_QUEUE}.create_sender", created_sender, "AFTER"),
    (f"{_QUEUE}.pop_bootstrapped", pop_bootstrapped, "AROUND"),
    ("sglang.srt.managers.load_snapshot.shm_path_for", load_snapshot_file, "AROUND"),
    ("sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer", shared_tokenizer, "AROUND"),
    ("sglang.srt.entrypoints.http_server.ORJSONRequest.json", resume.request_json, "AROUND"),
    ("starlette.responses.StreamingResponse.__call__", resume.streaming_response, "AROUND"),
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", resume.generate_request, "AROUND"),
    (f"{_GRAMMARS}.process_req_with_grammar", priming.process_grammar, "AROUND"),
    (f"{_GRAMMARS}.get_ready_grammar_requests", priming.ready_grammars, "AFTER"),
    (f"{_REQUEST}.tail_str", priming.tail_text, "AROUND"),
    (f"{_REQUEST}._locate_str_stop_finished_len", priming.stop_position, "AROUND"),
    ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", priming.sampling_info, "AFTER"),
    *fair.TABLE,
    *aside.TABLE,
)
"""Those that every server has."""
