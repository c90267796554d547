"""What SGLang's scheduler sees of the order of prompts: who is offered, who is set aside, and who comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kllm_engine.messages import PREFILL_ORDER_VARIABLE
from kllm_engine.policy.fair_prefill import FairPrefill
from kllm_engine.sglang import aside, fair

CHUNK = 64


class Request(SimpleNamespace):
    """As much of SGLang's request as the order needs; compared by identity, as there."""

    def __init__(self, rid: str, tokens: int, *, computed: int = 0) -> None:
        super().__init__(
            rid=rid, origin_input_ids=[0] * tokens, output_ids=[], prefix_indices=[0] * computed, seqlen=tokens,
            extend_range=SimpleNamespace(end=computed), kllm_cached_on_arrival=0, pending_bootstrap=False,
        )  # fmt: skip

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Scheduler(SimpleNamespace):
    """Forms steps as SGLang does: the one in progress first, then those that wait, as far as a chunk goes."""

    def __init__(self, *waiting: Request, chunked: Request | None = None, free: int = 10_000) -> None:
        super().__init__(
            waiting_queue=list(waiting), chunked_req=chunked, _pending_chunked_abort_req=None, page_size=4, ended=[],
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: free),
            tree_cache=SimpleNamespace(evictable_size=lambda: 0), offered=[],
        )  # fmt: skip

    def form(self, _scheduler: object):
        self.offered.append((self.chunked_req and self.chunked_req.rid, [each.rid for each in self.waiting_queue]))
        room, batch = CHUNK, []
        if self.chunked_req is not None:
            limit = fair._state.limit or room
            room -= self._compute(self.chunked_req, min(limit, room), batch)
            if self.chunked_req.extend_range.end == len(self.chunked_req.origin_input_ids):
                self.chunked_req = None
        for request in list(self.waiting_queue):
            if room <= 0:
                break
            self.waiting_queue.remove(request)
            room -= self._compute(request, room, batch)
            if request.extend_range.end < len(request.origin_input_ids):
                self.chunked_req = request
        return (batch or None), None

    def stash(self) -> None:
        """What SGLang does at the beginning of each iteration."""
        if self.chunked_req is not None:
            self.chunked_req.prefix_indices = [0] * self.chunked_req.extend_range.end

    def process_pending_chunked_abort(self) -> None:
        assert self.chunked_req is self._pending_chunked_abort_req
        self.ended.append(self.chunked_req.rid)
        self.chunked_req = self._pending_chunked_abort_req = None

    @staticmethod
    def _compute(request: Request, most: int, batch: list[Request]) -> int:
        start = len(request.prefix_indices)
        end = min(start + most, len(request.origin_input_ids))
        request.extend_range = SimpleNamespace(end=end)
        batch.append(request)
        return end - start


@pytest.fixture(autouse=True)
def state(monkeypatch):
    made = fair.FairScheduling(FairPrefill(CHUNK, 10_000, 4))
    monkeypatch.setattr(fair, "_state", made)
    return made


def step(scheduler: Scheduler) -> list[str]:
    scheduler.stash()
    batch, _ = fair.form_step(scheduler.form, scheduler)
    return [request.rid for request in batch or []]


def test_a_prompt_in_progress_is_set_aside_for_short_ones_and_goes_on_afterwards():
    long = Request("long", 1000)
    scheduler = Scheduler(long)
    assert step(scheduler) == ["long"]
    scheduler.waiting_queue.append(Request("short", 60))
    while "short" not in step(scheduler):
        pass
    computed = long.extend_range.end
    assert step(scheduler) == ["long"]
    assert long.extend_range.end == computed + CHUNK


def test_those_that_are_not_offered_keep_their_place(state):
    shorts = [Request(f"short{n}", 40) for n in range(3)]
    scheduler = Scheduler(Request("long", 1000), *shorts)
    step(scheduler)
    assert [request.rid for request in scheduler.waiting_queue][:1] in (["long"], ["short0"], ["short1"])
    names = [request.rid for request in scheduler.waiting_queue]
    assert names == [name for name in ("long", "short0", "short1", "short2") if name in names]


def test_nobody_is_lost_and_everybody_ends():
    requests = [Request(f"r{n}", 10 + 97 * (n % 5)) for n in range(20)]
    scheduler = Scheduler(*requests)
    for _ in range(500):
        step(scheduler)
    assert all(request.extend_range.end == len(request.origin_input_ids) for request in requests)
    assert not fair.set_aside()
    assert scheduler.chunked_req is None


def test_one_that_is_aborted_while_it_is_set_aside_ends_before_the_next_step(state):
    first, other = Request("aside", 900, computed=64), Request("other", 900, computed=64)
    state.aside = [first]
    scheduler = Scheduler(chunked=other)
    aside.aborted(None, scheduler, SimpleNamespace(abort_all=False, rid="aside"))
    step(scheduler)
    assert scheduler.ended == ["aside"]
    assert not any(request is first for request in state.aside)


def test_an_abort_of_all_ends_all_that_are_set_aside(state):
    state.aside = [Request("a", 900, computed=64), Request("b", 900, computed=64)]
    scheduler = Scheduler()
    aside.aborted(None, scheduler, SimpleNamespace(abort_all=True, rid=""))
    step(scheduler)
    assert scheduler.ended == ["a", "b"]


def test_what_is_set_aside_counts_as_work(state):
    assert aside.fully_idle(True, None)
    state.aside = [Request("a", 900, computed=64)]
    assert not aside.fully_idle(True, None)
    assert aside.pending_tokens(100) == 100 + 900 - 64
    assert aside.in_flight(set(), None) == set(state.aside)


def test_a_result_of_one_that_is_set_aside_is_not_taken_for_one_that_gave_its_kv_up(state):
    first, other = Request("a", 900, computed=64), Request("b", 900, computed=64)
    state.aside = [first]
    scheduler = Scheduler(chunked=other)
    seen = []
    aside.prefill_result(
        lambda s, *_: seen.append(s.chunked_req), scheduler, SimpleNamespace(reqs=[Request("c", 5), first]), None
    )
    assert seen == [first]
    assert scheduler.chunked_req is other


def test_a_prompt_for_which_the_pool_has_no_page_waits_for_one(state):
    long = Request("long", 900, computed=64)
    scheduler = Scheduler(chunked=long, free=6)
    assert step(scheduler) == []
    assert state.aside == [long]


def test_an_order_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(PREFILL_ORDER_VARIABLE, "quick")
    with pytest.raises(ValueError, match="KLLM_PREFILL_ORDER must be fair or fcfs, got 'quick'"):
        fair.wanted_order()
