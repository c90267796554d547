"""The work queue, in virtual time: each key once, one worker per key, pauses after failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop.virtual_time import run_virtually

from kllm_operator.kube.exceptions import UnreachableError
from kllm_operator.kube.queue import Backoff, WorkQueue


def within(work, queue_of):
    """Run `work(queue)` while the queue's workers run."""

    async def whole():
        queue = queue_of()
        running = asyncio.create_task(queue.run())
        try:
            return await work(queue)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    return run_virtually(whole())


def test_a_key_that_is_added_often_is_worked_on_once():
    worked = []

    async def work(key):
        worked.append(key)

    async def adding(queue):
        for _ in range(5):
            queue.add("a")
        assert len(queue) == 1
        await asyncio.sleep(1)

    within(adding, lambda: WorkQueue(work))
    assert worked == ["a"]


def test_a_key_that_is_added_while_it_is_worked_on_is_worked_on_once_more_and_not_at_the_same_time():
    active, most, worked = Counter(), Counter(), []

    async def work(key):
        active[key] += 1
        most[key] = max(most[key], active[key])
        await asyncio.sleep(10)
        active[key] -= 1
        worked.append(asyncio.get_running_loop().time())

    async def adding(queue):
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        queue.add("a")
        await asyncio.sleep(60)

    within(adding, lambda: WorkQueue(work))
    assert worked == [10, 20]
    assert most["a"] == 1


def test_other_keys_do_not_wait_for_a_slow_one():
    ended = {}

    async def work(key):
        await asyncio.sleep(100 if key == "slow" else 1)
        ended[key] = asyncio.get_running_loop().time()

    async def adding(queue):
        for key in ("slow", "b", "c"):
            queue.add(key)
        await asyncio.sleep(200)

    within(adding, lambda: WorkQueue(work, workers=2))
    assert ended == {"b": 1, "c": 2, "slow": 100}


def test_a_key_that_fails_comes_again_after_pauses_that_double_until_it_succeeds():
    began = []

    async def work(key):
        began.append(asyncio.get_running_loop().time())
        if len(began) < 6:
            raise UnreachableError("not yet")

    async def adding(queue):
        queue.add("a")
        await asyncio.sleep(1000)
        began.append("again")
        queue.add("a")
        await asyncio.sleep(1)

    within(adding, lambda: WorkQueue(work, backoff=Backoff(first_seconds=1, most_seconds=6)))
    assert began == [0, 1, 3, 7, 13, 19, "again", 1000]


def test_success_forgets_earlier_failures():
    began = []
    outcomes = iter([False, True, False, True])

    async def work(key):
        began.append(asyncio.get_running_loop().time())
        if not next(outcomes):
            raise UnreachableError("no")

    async def adding(queue):
        queue.add("a")
        await asyncio.sleep(10)
        queue.add("a")
        await asyncio.sleep(10)

    within(adding, lambda: WorkQueue(work, backoff=Backoff(first_seconds=2)))
    assert began == [0, 2, 10, 12]


def test_an_event_during_the_pause_after_a_failure_does_not_wait_for_its_end():
    began = []

    async def work(key):
        began.append(asyncio.get_running_loop().time())
        raise UnreachableError("no")

    async def adding(queue):
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        await asyncio.sleep(5)

    within(adding, lambda: WorkQueue(work, backoff=Backoff(first_seconds=100)))
    assert began == [0, 1]


def test_a_key_comes_again_after_the_time_that_its_work_returned():
    began = []

    async def work(key):
        began.append(asyncio.get_running_loop().time())
        return 7.0

    async def adding(queue):
        queue.add("a")
        await asyncio.sleep(15)

    within(adding, lambda: WorkQueue(work))
    assert began == [0, 7, 14]


def test_of_two_times_the_earlier_counts():
    began = []

    async def work(key):
        began.append(asyncio.get_running_loop().time())

    async def adding(queue):
        queue.add_after("a", 30)
        queue.add_after("a", 10)
        queue.add_after("a", 20)
        assert len(queue) == 0
        await asyncio.sleep(100)

    within(adding, lambda: WorkQueue(work))
    assert began == [10]


def test_waiting_and_working_times_are_told():
    told = []

    class Observer:
        def waited(self, seconds):
            told.append(("waited", seconds))

        def worked(self, seconds, *, failed):
            told.append(("worked", seconds, failed))

    async def work(key):
        await asyncio.sleep(3)
        if key == "bad":
            raise UnreachableError("no")

    async def adding(queue):
        queue.add("good")
        queue.add("bad")
        assert queue.longest_seconds == 0
        await asyncio.sleep(2)
        assert queue.longest_seconds == 2
        await asyncio.sleep(5)

    within(adding, lambda: WorkQueue(work, workers=1, observer=Observer(), backoff=Backoff(first_seconds=100)))
    assert told == [("waited", 0), ("worked", 3, False), ("waited", 3), ("worked", 3, True)]


def test_a_queue_without_workers_is_refused():
    async def work(key):
        del key

    with pytest.raises(ValueError, match="at least 1"):
        WorkQueue(work, workers=0)


_KEYS = st.sampled_from("abc")
_STEP = st.one_of(
    st.tuples(st.just("add"), _KEYS, st.just(0.0)),
    st.tuples(st.just("after"), _KEYS, st.floats(0.0, 20.0)),
    st.tuples(st.just("wait"), st.just(""), st.floats(0.01, 15.0)),
)


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(_STEP, max_size=40),
    workers=st.integers(1, 4),
    seconds=st.floats(0.0, 5.0),
    failing=st.lists(st.booleans(), max_size=30),
)
def test_every_wish_is_followed_by_work_that_begins_after_it_and_no_key_has_two_workers(
    steps, workers, seconds, failing
):
    begun: dict[str, list[float]] = {key: [] for key in "abc"}
    wished: dict[str, float] = {}
    active: Counter[str] = Counter()
    outcomes = iter(failing)

    async def work(key):
        begun[key].append(asyncio.get_running_loop().time())
        active[key] += 1
        assert active[key] == 1
        assert sum(active.values()) <= workers
        await asyncio.sleep(seconds)
        active[key] -= 1
        if next(outcomes, False):
            raise UnreachableError("no")

    async def adding(queue):
        loop = asyncio.get_running_loop()
        for what, key, value in steps:
            if what == "wait":
                await asyncio.sleep(value)
            elif what == "add":
                queue.add(key)
                wished[key] = loop.time()
            else:
                queue.add_after(key, value)
                wished[key] = max(wished.get(key, 0.0), loop.time())
        # Longer than every pause and all work together.
        await asyncio.sleep(10_000)
        assert len(queue) == 0

    within(adding, lambda: WorkQueue(work, workers=workers, backoff=Backoff(first_seconds=1, most_seconds=30)))
    for key, at in wished.items():
        assert begun[key]
        assert begun[key][-1] >= at
