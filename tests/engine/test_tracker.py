"""Each prefilled request is told of twice: when its KV is complete, and when it has left."""

from __future__ import annotations

from kllm_engine.sglang.tracker import Prefilled, Tracker


def prefilled(rid: str = "a", *, bound: bool = False) -> Prefilled:
    return Prefilled(
        rid=rid,
        prompt_tokens=10,
        cached_tokens=4,
        queue_seconds=0.1,
        prefill_seconds=0.2,
        since=5.0,
        bound_at=5.0 if bound else None,
    )


def test_a_parked_request_is_told_of_and_its_wait_is_measured_until_it_is_bound():
    tracker = Tracker(1)
    done = tracker.done(prefilled())
    assert (done.kind, done.bound, done.cached_tokens) == ("prefill_done", False, 4)
    assert [request.rid for request in tracker.parked] == ["a"]
    tracker.bound("a", 7.0)
    tracker.bound("a", 9.0)
    assert tracker.parked == []
    left = tracker.released("a", now=9.5, outcome="Transferred")
    assert left is not None
    assert (left.kind, left.reason, left.parked_seconds) == ("released", "Transferred", 2.0)
    assert tracker.prefilled == {}


def test_a_bound_request_was_never_parked():
    tracker = Tracker(1)
    assert tracker.done(prefilled(bound=True)).bound
    assert tracker.parked == []
    left = tracker.released("a", now=9.0, outcome="Transferred")
    assert left is not None
    assert left.parked_seconds == 0.0


def test_a_request_that_was_given_up_says_so_whatever_the_engine_calls_it():
    tracker = Tracker(1)
    tracker.done(prefilled())
    tracker.prefilled["a"].timed_out = True
    left = tracker.released("a", now=35.0, outcome="TransferFailed")
    assert left is not None
    assert (left.kind, left.reason, left.parked_seconds) == ("released", "ParkTimeout", 30.0)


def test_a_failed_transfer_is_a_failure():
    tracker = Tracker(1)
    tracker.done(prefilled(bound=True))
    left = tracker.released("a", now=6.0, outcome="TransferFailed", message="gone")
    assert left is not None
    assert (left.kind, left.message) == ("failed", "gone")


def test_an_unknown_request_makes_no_event():
    assert Tracker(1).released("nobody", now=1.0, outcome="Aborted") is None
