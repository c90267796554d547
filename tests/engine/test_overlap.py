"""With overlapped scheduling a batch is launched before the results of the one ahead of it are there."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from kllm_engine.sglang import hooks
from kllm_engine.sglang.observation import committed
from kllm_engine.sglang.pacing import PaceTally
from kllm_engine.sglang.park import Committed, ParkLimits
from kllm_engine.sglang.reporter import Reporter


def request(tokens: int, *, pending: bool = True):
    return SimpleNamespace(origin_input_ids=[0] * tokens, pending_bootstrap=pending)


def scheduler_with(*batches, overlap: bool = True, chunked=None, inflight=(), waiting=()):
    return SimpleNamespace(
        enable_overlap=overlap,
        result_queue=deque((SimpleNamespace(reqs=batch), None) for batch in batches),
        disagg_prefill_inflight_queue=list(inflight),
        waiting_queue=list(waiting),
        chunked_req=chunked,
    )


def test_a_launched_batch_counts_against_the_watermark_of_parked_prompts():
    scheduler = scheduler_with([request(30), request(9, pending=False)], inflight=[request(10)], waiting=[request(2)])
    assert committed(scheduler) == Committed(3, 42)


def test_a_prompt_of_which_a_chunk_is_launched_counts_once():
    chunked = request(600)
    assert committed(scheduler_with([chunked], chunked=chunked)) == Committed(1, 600)


def test_without_overlap_nothing_is_launched_and_unfinished():
    scheduler = scheduler_with(overlap=False, waiting=[request(2)])
    del scheduler.result_queue
    assert committed(scheduler) == Committed(1, 2)


class Mode(SimpleNamespace):
    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind)

    def is_decode(self):
        return self.kind == "decode"

    def is_target_verify(self):
        return self.kind == "verify"

    def is_extend_without_speculative(self):
        return self.kind == "extend"


class Loads:
    """Takes the place of the way to the agent; keeps what was published as running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing: list[int] = []
        self.scheduler = SimpleNamespace(forward_ct=0)
        self.reporter = Reporter(
            self.scheduler, link=self, limits=ParkLimits(tokens=1, requests=1, seconds=1), failed_status=None,
            single_rank=True, tally=PaceTally(),
        )  # fmt: skip
        self.scheduler.kllm_reporter = self.reporter
        monkeypatch.setattr("kllm_engine.sglang.reporter.observe", lambda *_, computing, **__: computing)

    def put(self, computing: int) -> None:
        self.computing.append(computing)

    def flush(self) -> None:
        """Nothing to do."""

    def launch(self, kind: str, requests: int):
        batch = SimpleNamespace(
            forward_mode=Mode(kind), reqs=[object()] * requests, launch_ts=None, extend_num_tokens=7 * requests
        )
        self.reporter.step_begins(batch)
        self.scheduler.forward_ct += 1
        batch.forward_iter = self.scheduler.forward_ct
        return batch

    def told(self) -> int:
        self.reporter.publish()
        return self.computing[-1]


@pytest.fixture
def loads(monkeypatch):
    return Loads(monkeypatch)


def test_a_batch_stays_running_when_the_one_ahead_of_it_ends(loads):
    first = loads.launch("extend", 2)
    assert loads.computing[-1] == 2
    second = loads.launch("extend", 5)
    loads.reporter.step_ended(first, tokens=14, prefill=True)
    assert loads.told() == 5
    loads.reporter.step_ended(second, tokens=35, prefill=True)
    assert loads.told() == 0


def test_a_decode_step_is_no_prefill_that_runs(loads):
    loads.launch("extend", 2)
    loads.launch("decode", 9)
    assert loads.told() == 0


def test_accepted_drafts_are_counted_once_the_step_is_processed(loads):
    batch = loads.launch("verify", 2)
    result = SimpleNamespace(accepted=0)
    result.get_num_generated_tokens = lambda size: size + result.accepted

    def original(_scheduler, ended, told):
        told.accepted = 6
        ended.reqs = []

    hooks.process_batch_result(original, loads.scheduler, batch, result)
    assert loads.reporter.meters.decode.total_tokens == 8
