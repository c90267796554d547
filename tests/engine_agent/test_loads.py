from __future__ import annotations

import hypothesis.strategies as st
from engine_agent.harness import authorised, until
from hypothesis import given

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_engine.agent.instance import Instance
from kllm_engine.agent.loads import OPTIONAL_FIELDS, LoadBook, delta
from kllm_engine.messages import Load

_counts = st.integers(0, 2)


def _book() -> tuple[Instance, LoadBook]:
    instance = Instance("a", service="chat", model_name="tiny", role=Role.PREFILL)
    return instance, LoadBook(instance, clock=lambda: 10.0)


def test_a_report_before_the_engine_said_anything_has_role_and_state_only() -> None:
    _, book = _book()
    report = book.report(1)
    assert report.state == engine_pb2.INSTANCE_STATE_STARTING
    assert report.role == engine_pb2.ROLE_PREFILL
    assert not report.HasField("running_requests")
    assert book.remaining_requests() is None


def test_a_report_has_the_engines_numbers_and_their_age_and_no_number_for_what_was_never_measured() -> None:
    _, book = _book()
    book.update(Load(pid=1, now=9.5, role="prefill", running_requests=2, parked_requests=3, prefill_step_seconds=0.0))
    report = book.report(7)
    assert report.sequence == 7
    assert report.age_seconds == 0.5
    assert report.running_requests == 2
    assert report.HasField("queued_requests")
    assert report.queued_requests == 0
    assert not report.HasField("prefill_step_seconds")
    assert not report.HasField("parked_limit_tokens")
    assert book.remaining_requests() == 5


def test_in_a_long_step_of_a_living_engine_the_numbers_look_two_seconds_old_and_without_life_their_age_grows() -> None:
    now = 10.0
    instance, _ = _book()
    book = LoadBook(instance, clock=lambda: now)
    book.update(Load(pid=1, now=10.0, role="prefill"))
    ages = []
    for now in (11.5, 13.0, 20.0):
        book.alive(now - 0.4)
        ages.append(book.report(1).age_seconds)
    assert ages == [1.5, 2.0, 2.0]
    now = 24.6
    assert abs(book.report(1).age_seconds - 5.0) < 1e-9


def test_an_engine_that_is_paced_tells_how_well_it_keeps_its_pace() -> None:
    _, book = _book()
    assert book.pace_words() == ""
    book.update(Load(pid=1, now=9.5, role="prefill", paced_steps=400, late_steps=3, late_seconds=0.0123))
    assert book.pace_words() == "3 of 400 steps late, by 0.012 s in all"


@given(st.lists(st.builds(Load, pid=st.just(1), now=st.just(1.0), role=st.just("prefill"),
                          running_requests=_counts, parked_tokens=_counts, decode_step_seconds=st.floats(0, 1)),
                min_size=1, max_size=8))  # fmt: skip
def test_reports_rebuilt_from_deltas_equal_full_reports(loads: list[Load]) -> None:
    """A subscriber keeps the last known value of each field."""
    instance, book = _book()
    known: dict[str, object] = {}
    expected: dict[str, object] = {}
    before = None
    for number, load in enumerate(loads, start=1):
        book.update(load)
        if number == 3:
            instance.move(InstanceState.SERVING, "")
        now = book.report(number)
        sent = now if before is None else delta(before, now)
        before = now
        assert sent.sequence == number
        for name in OPTIONAL_FIELDS:
            if sent.HasField(name):
                known[name] = getattr(sent, name)
            if now.HasField(name):
                expected[name] = getattr(now, name)
        assert known == expected


def test_a_delta_of_equal_reports_has_no_optional_field() -> None:
    _, book = _book()
    book.update(Load(pid=1, now=1.0, role="prefill", running_requests=2))
    smaller = delta(book.report(1), book.report(2))
    assert not any(smaller.HasField(name) for name in OPTIONAL_FIELDS)


async def test_a_change_of_parked_requests_is_told_long_before_the_interval_is_over(agents) -> None:
    agent = agents("chat-prefill-0")
    await agent.start()
    await agent.event("serving")
    request = engine_pb2.WatchLoadRequest(interval_milliseconds=5_000, deltas=True)
    watch = agent.stub().WatchLoad(request, metadata=authorised(), timeout=4)
    first = await watch.read()
    assert first.sequence == 1
    assert first.state == engine_pb2.INSTANCE_STATE_SERVING
    agent.order(do="load", fields={"parked_requests": 1, "parked_tokens": 64})
    second = await watch.read()
    assert (second.sequence, second.parked_requests, second.parked_tokens) == (2, 1, 64)
    assert not second.HasField("state")
    watch.cancel()
    await until(watch.done, "the stream has ended")
