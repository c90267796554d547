"""What the plugin keeps for one scheduler: measurements, parked requests, and the way to the agent."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kllm_engine.messages import Heartbeat, Hello, Message, Request
from kllm_engine.sglang.fair import abort_soon, set_aside
from kllm_engine.sglang.link import AgentLink
from kllm_engine.sglang.meter import StepMeter
from kllm_engine.sglang.observation import Meters, committed, observe, prefilled, prompt_tokens, role_of
from kllm_engine.sglang.pacing import PaceTally
from kllm_engine.sglang.park import ParkLimits, admissible, overdue
from kllm_engine.sglang.rooms import ConcludedRooms
from kllm_engine.sglang.tracker import Outcome, Prefilled, Tracker

_LOAD_SECONDS = 0.05
_HEARTBEAT_SECONDS = 0.5


class Reporter:
    """One scheduler's reporter; all methods but the heartbeat run on the scheduler's thread.

    Args:
        scheduler: SGLang's Scheduler.
        link: way to the agent; None measures and limits without telling anyone.
        limits: bounds of parked KV.
        failed_status: SGLang's status of a failed transfer.
        single_rank: the engine has one scheduler process.
        tally: how well steps keep their pace.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        link: AgentLink | None,
        limits: ParkLimits,
        failed_status: Any,
        single_rank: bool,
        tally: PaceTally,
    ) -> None:
        self.limits = limits
        self.meters = Meters(StepMeter(), StepMeter(), tally)
        self.tracker = Tracker(os.getpid())
        self.rooms = ConcludedRooms()
        self._scheduler = scheduler
        self._link = link
        self._failed_status = failed_status
        self._single_rank = single_rank
        self._abandoned: set[str] = set()
        self._computing = 0
        self._loops = 0
        self._loop_began = time.monotonic()
        self._load_due = 0.0
        self._step_ended = 0.0
        self._stopped = threading.Event()

    def start(self, hello: Hello) -> None:
        """Introduce this server and begin its heartbeat."""
        self._put(hello)
        self.publish()
        if self._link is not None:
            threading.Thread(target=self._beat, name="kllm-heartbeat", daemon=True).start()

    def begin_again(self, hello: Hello, limits: ParkLimits) -> None:
        """The scheduler, which was empty, has another role now: nothing of the one before is left but its pace."""
        self.limits = limits
        self.meters = Meters(StepMeter(), StepMeter(), self.meters.pace)
        self.tracker = Tracker(os.getpid())
        self.rooms = ConcludedRooms()
        self._abandoned = set()
        self._computing = 0
        self._put(hello)
        self.publish()

    def iteration(self) -> None:
        """An iteration of the event loop begins."""
        now = time.monotonic()
        self._loops += 1
        self._loop_began = now
        if role_of(self._scheduler) == "prefill":
            self._expire(now)
            manager = self._scheduler.disagg_prefill_bootstrap_queue.kv_manager
            self.rooms.answer(manager, now=now, failed=self._failed_status)
            self._stop_abandoned()
        if now >= self._load_due:
            self.publish()

    def step_begins(self, batch: Any) -> None:
        """A batch is about to be computed; a long step must not hide what runs in it."""
        prefill = batch.forward_mode.is_extend_without_speculative()
        self._computing = len(batch.reqs) if prefill else 0
        if prefill:
            self.publish()

    def step_ended(self, batch: Any, *, tokens: int, prefill: bool) -> None:
        """A batch was computed and its results are handed on."""
        now = time.monotonic()
        # With overlapped scheduling a batch is launched before the one ahead of it has ended.
        if batch.forward_iter == self._scheduler.forward_ct:
            self._computing = 0
        began = max(batch.launch_ts or now, self._step_ended)
        self._step_ended = now
        meter = self.meters.prefill if prefill else self.meters.decode
        meter.add(tokens, now - began)

    def publish(self) -> None:
        """Send the load now."""
        self._load_due = time.monotonic() + _LOAD_SECONDS
        if self._link is None:
            return
        load = observe(
            self._scheduler,
            meters=self.meters,
            tracker=self.tracker,
            computing=self._computing,
            parked_limit=self.limits.tokens,
        )
        self._link.put(load)
        self._link.flush()

    def requests_prefilled(self, requests: list[Any]) -> None:
        """Requests of a batch whose KV is now complete here."""
        now = time.monotonic()
        for request in requests:
            if request.rid not in self.tracker.prefilled:
                self._put(self.tracker.done(prefilled(request, now=now)))
        self._flush()

    def request_left(self, request: Any, outcome: Outcome, message: str) -> None:
        """A prefilled request's KV is no longer held for it."""
        event = self.tracker.released(request.rid, now=time.monotonic(), outcome=outcome, message=message)
        if event is not None:
            self._put(event)
            self._flush()

    def request_bound(self, request: Any) -> None:
        """A decode instance has asked for a prefilled request's KV."""
        self.tracker.bound(request.rid, time.monotonic())

    def request_failed(self, request: Any, reason: str, message: str) -> None:
        """A request ended before its KV was complete."""
        self._event(request, kind="failed", reason=reason, message=message)

    def request_requeued(self, request: Any) -> None:
        """A prompt was pushed back; its pages are in the prefix cache, and no longer held."""
        self.tracker.prefilled.pop(request.rid, None)
        self._event(request, kind="requeued", reason="Yielded", message="")

    def give_up(self, request: Any, reason: str) -> None:
        """Remember that nobody will get this request's KV any more."""
        self.rooms.add(request.bootstrap_room, reason)

    def admitted_without_decode(self, queue: list[Any]) -> int:
        """How many requests at the head of the bootstrap queue may be prefilled before a decode instance is known."""
        return admissible(
            [prompt_tokens(request) for request in queue],
            committed=committed(self._scheduler),
            limits=self.limits,
        )

    def _expire(self, now: float) -> None:
        parked = {request.rid: request.since for request in self.tracker.parked}
        late = set(overdue(parked, now=now, limits=self.limits)) if parked else set()
        if not late:
            return
        message = f"no decode instance took the KV within {self.limits.seconds:g} s"
        for request in self._scheduler.disagg_prefill_inflight_queue:
            if request.rid in late and request.pending_bootstrap:
                entry: Prefilled = self.tracker.prefilled[request.rid]
                if not entry.timed_out:
                    entry.timed_out = True
                    sender = request.disagg_kv_sender
                    sender.abort()
                    # abort() records that a client asked for it.
                    sender.kv_mgr.record_failure(sender.bootstrap_room, message)

    def abort_reason(self, request: Any) -> tuple[str, str]:
        """Why a request is being aborted, as reason and message."""
        if request.rid in self._abandoned:
            self._abandoned.discard(request.rid)
            return "TransferFailed", "the decode instance gave the request up"
        return "Aborted", "the request was aborted"

    def _stop_abandoned(self) -> None:
        """Compute no further chunks of a prompt whose decode instance has gone; SGLang looks only after the last.

        Ranks of one engine may hear of it in different iterations and must not part ways, so that only single-rank
        engines stop early.
        """
        if not self._single_rank:
            return
        chunked = self._scheduler.chunked_req
        if chunked is not None and self._is_abandoned(chunked):
            self._abandoned.add(chunked.rid)
            self._scheduler._pending_chunked_abort_req = chunked
        for request in set_aside():
            if self._is_abandoned(request):
                self._abandoned.add(request.rid)
                abort_soon(request)

    def _is_abandoned(self, request: Any) -> bool:
        if request.pending_bootstrap or request.rid in self._abandoned:
            return False
        return bool(request.disagg_kv_sender.poll() == self._failed_status)

    def _event(self, request: Any, *, kind: Any, reason: str, message: str) -> None:
        event = Request(
            pid=os.getpid(),
            now=time.monotonic(),
            kind=kind,
            rid=request.rid,
            prompt_tokens=prompt_tokens(request),
            reason=reason,
            message=message,
        )
        self._put(event)
        self._flush()

    def _beat(self) -> None:
        while not self._stopped.wait(_HEARTBEAT_SECONDS):
            now = time.monotonic()
            beat = Heartbeat(pid=os.getpid(), now=now, loops=self._loops, loop_age=max(0.0, now - self._loop_began))
            self._put(beat)
            self._flush()

    def _put(self, message: Message) -> None:
        if self._link is not None:
            self._link.put(message)

    def _flush(self) -> None:
        if self._link is not None:
            self._link.flush()


def idle_wait(socket_of: Callable[[], Any], *, milliseconds: int = 2) -> Callable[[], None]:
    """A wait that ends early when a request arrives.

    Args:
        socket_of: gives the ZMQ socket on which requests arrive, or None on ranks that have none.
        milliseconds: longest wait.
    """
    zmq: Any = importlib.import_module("zmq")
    poller = zmq.Poller()
    socket = socket_of()
    if isinstance(socket, zmq.Socket):
        poller.register(socket, zmq.POLLIN)

        def wait() -> None:
            poller.poll(milliseconds)
    else:

        def wait() -> None:
            time.sleep(milliseconds / 1000)

    return wait
