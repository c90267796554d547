from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_router.proxy.record import Record, new_record


def record() -> Record:
    return new_record("p0", Role.PREFILL, "127.0.0.1:1")


def report(**values: object) -> engine_pb2.LoadReport:
    return engine_pb2.LoadReport(incarnation=1, **values)


def test_fields_that_a_report_leaves_out_stay_as_they_were():
    known = record()
    known.learn_load(report(running_requests=3, kv_used_tokens=70, state=engine_pb2.INSTANCE_STATE_SERVING), 10.0)

    known.learn_load(report(running_requests=0, age_seconds=0.5), 11.0)

    load = known.instance.load
    assert load is not None
    assert (load.running_requests, load.kv_used_tokens, load.queued_requests) == (0, 70, None)
    assert known.instance.state is InstanceState.SERVING
    assert known.age(12.0) == 1.5


def test_a_state_without_a_load_is_an_unknown_load():
    known = record()

    known.learn_load(report(state=engine_pb2.INSTANCE_STATE_SERVING), 10.0)

    assert known.instance.load is None
    assert known.age(11.0) is None


def test_why_an_instance_is_in_its_state_is_kept_until_it_is_told_anew():
    known = record()
    known.learn_load(report(state=engine_pb2.INSTANCE_STATE_FAILED, message="the engine ended, signal 9"), 10.0)

    known.learn_load(report(running_requests=0), 11.0)
    assert known.message == "the engine ended, signal 9"

    known.learn_load(report(state=engine_pb2.INSTANCE_STATE_SERVING, message=""), 12.0)
    assert not known.message


def test_after_a_broken_stream_nothing_is_taken_over():
    known = record()
    known.learn_load(report(running_requests=3, kv_used_tokens=70), 10.0)
    known.forget_load()

    known.learn_load(report(running_requests=1), 11.0)

    assert known.instance.load is not None
    assert known.instance.load.kv_used_tokens is None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5), st.integers(0, 100)),
        st.tuples(st.just("finish"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 3), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS)
@example(steps=[("send", 0, 5), ("send", 1, 7), ("send", 0, 5), ("report", 1, 0)])
def test_what_was_sent_counts_until_a_later_load_or_its_end(steps: list[tuple[str, int, int]]):
    known, model, now = record(), {}, 0.0
    for what, number, tokens in steps:
        now += 1.0
        rid = f"r{number}"
        if what == "send":
            known.send(rid, tokens, now)
            model[rid] = (tokens, now)
        elif what == "finish":
            assert known.finish(rid) == (rid in model)
            model.pop(rid, None)
        elif what == "settle":
            known.settle(rid)
            if rid in model:
                model[rid] = (0, -1.0)
        else:
            known.learn_load(report(running_requests=0, age_seconds=number), now)
            model = {r: (t, at) if at >= now - number else (0, -1.0) for r, (t, at) in model.items()}

        candidate = known.prefill_candidate(now)
        assert candidate.unreported_tokens == sum(t for t, at in model.values() if at >= 0)
        assert candidate.in_flight == len(model)
        assert known.decode_candidate(now).unreported_requests == sum(at >= 0 for _, at in model.values())
