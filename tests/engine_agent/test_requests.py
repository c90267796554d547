from __future__ import annotations

import grpc
import pytest
from engine_agent.harness import authorised

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_engine.agent.requests import RequestBook, SlowSubscriberError
from kllm_engine.messages import Request

DONE = engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE
REQUEUED = engine_pb2.REQUEST_EVENT_KIND_REQUEUED
RELEASED = engine_pb2.REQUEST_EVENT_KIND_RELEASED


def _request(rid: str, kind: str, **fields: object) -> Request:
    return Request(pid=1, now=1.0, rid=rid, kind=kind, **fields)


async def test_a_subscriber_hears_of_waiting_requests_first_and_then_of_new_ones() -> None:
    book = RequestBook()
    book.update(_request("a", "prefill_done", prompt_tokens=5), 7)
    book.update(_request("b", "prefill_done"), 7)
    book.update(_request("a", "released", reason="Transferred"), 7)
    book.update(_request("c", "requeued"), 7)
    with book.subscribe() as subscription:
        book.update(_request("d", "failed"), 7)
        heard = [await subscription.next() for _ in range(3)]
    assert [(event.request_id, event.kind) for event in heard] == [
        ("b", DONE),
        ("c", REQUEUED),
        ("d", engine_pb2.REQUEST_EVENT_KIND_FAILED),
    ]
    assert heard[0].incarnation == 7


async def test_a_request_with_its_decode_instance_bound_is_told_live_but_waits_for_none() -> None:
    book = RequestBook()
    with book.subscribe() as subscription:
        book.update(_request("a", "prefill_done", bound=True), 1)
        assert (await subscription.next()).kind == DONE
    assert book.waiting() == []


async def test_a_slow_subscriber_is_told_that_it_lost_events_and_others_are_not_hurt() -> None:
    book = RequestBook(queue_limit=2)
    with book.subscribe() as slow, book.subscribe() as fast:
        for number in range(3):
            book.update(_request(str(number), "prefill_done"), 1)
            assert (await fast.next()).request_id == str(number)
        with pytest.raises(SlowSubscriberError):
            await slow.next()
    with book.subscribe() as again:
        assert [(await again.next()).request_id for _ in range(3)] == ["0", "1", "2"]


async def test_a_new_stream_replays_parked_requests(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    live = agent.stub().WatchRequests(engine_pb2.WatchRequestsRequest(), metadata=authorised(), timeout=20)
    await live.initial_metadata()
    fields = {"prompt_tokens": 12, "cached_tokens": 4, "queue_seconds": 0.5, "prefill_seconds": 0.25}
    agent.order(do="request", fields={"kind": "prefill_done", "rid": "a" * 32, **fields})
    event = await live.read()
    assert (event.request_id, event.kind, event.prompt_tokens, event.cached_tokens) == ("a" * 32, DONE, 12, 4)
    assert (event.queue_seconds, event.prefill_seconds) == (0.5, 0.25)
    live.cancel()

    again = agent.stub().WatchRequests(engine_pb2.WatchRequestsRequest(), metadata=authorised(), timeout=20)
    assert (await again.read()).request_id == "a" * 32
    agent.order(do="request", fields={"kind": "released", "rid": "a" * 32, "reason": "Transferred"})
    released = await again.read()
    assert (released.kind, released.reason) == (RELEASED, "Transferred")
    again.cancel()


async def test_drain_takes_nothing_new_and_ends_when_the_engine_is_empty(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    agent.order(do="load", fields={"running_requests": 2})
    drain = agent.stub().Drain(engine_pb2.DrainRequest(), metadata=authorised(), timeout=20)
    assert (await drain.read()).remaining_requests == 2
    instance = await agent.stub().GetInstance(engine_pb2.GetInstanceRequest(), metadata=authorised())
    assert instance.state == engine_pb2.INSTANCE_STATE_DRAINING
    agent.order(do="load", fields={"running_requests": 1})
    progress = await drain.read()
    assert progress.remaining_requests == 1
    agent.order(do="load", fields={})
    while not progress.drained:
        progress = await drain.read()
    assert progress.remaining_requests == 0
    assert await drain.read() is grpc.aio.EOF


async def test_a_drain_with_a_deadline_ends_with_what_remains(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    agent.order(do="load", fields={"running_requests": 2})
    drain = agent.stub().Drain(engine_pb2.DrainRequest(deadline_milliseconds=2000), metadata=authorised(), timeout=20)
    last = [progress async for progress in drain][-1]
    assert last.deadline_passed
    assert not last.drained
    assert last.remaining_requests == 2


async def test_a_role_switch_is_refused(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await agent.stub().SwitchRole(engine_pb2.SwitchRoleRequest(role=engine_pb2.ROLE_DECODE), metadata=authorised())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_cache_stream_begins_with_a_snapshot(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start(role="decode")
    await agent.event("serving")
    watch = agent.stub().WatchCache(engine_pb2.WatchCacheRequest(), metadata=authorised(), timeout=20)
    update = await watch.read()
    assert update.sequence == 1
    assert update.snapshot.first
    assert update.snapshot.last
    watch.cancel()
