"""One engine: order and length of its steps, its KV, and its decode steps jumped as if stepped."""

import itertools
import math
from dataclasses import replace

import pytest
from engine_model.engines import TIMING, Driver, engine, job, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm_core.engine_model.engine import Engine
from kllm_core.engine_model.job import Kind, Phase
from kllm_core.engine_model.spec import Duty, EngineSpec

P, D = TIMING.prefill, TIMING.decode


def test_a_prompt_takes_as_long_as_its_chunks():
    driver = Driver(engine(Duty.PREFILL))
    long = job(2500)
    driver.submit(1.0, long)
    chunks = P.seconds(1000) + P.seconds(1000, 1000) + P.seconds(500, 2000)
    assert driver.run().times(Kind.PREFILLED)[long] == pytest.approx(1.0 + chunks)


def test_short_prompts_share_a_step_and_the_last_one_is_cut():
    driver = Driver(engine(Duty.PREFILL))
    first, second, third = job(300), job(600), job(300)
    driver.submit(0.0, first, second, third)
    done = driver.run().times(Kind.PREFILLED)
    step = P.batch_seconds([(300, 0), (600, 0), (100, 0)])
    assert done[first] == done[second] == pytest.approx(step)
    assert done[third] == pytest.approx(step + P.seconds(200, 100))


def test_a_prompt_that_comes_during_a_step_waits_for_its_end():
    driver = Driver(engine(Duty.PREFILL))
    first, second = job(1000), job(1000)
    driver.submit(0.0, first)
    driver.submit(0.05, second)
    assert driver.run().times(Kind.PREFILLED)[second] == pytest.approx(2 * P.seconds(1000))


def test_an_order_decides_which_prompt_comes_first():
    def shortest(prompts, tokens):
        return [(each, tokens) for each in sorted(prompts, key=lambda each: each.prompt_tokens)]

    driver = Driver(Engine(spec(), Duty.PREFILL, turns=shortest))
    busy, long, short = job(1000), job(1000), job(500)
    driver.submit(0.0, busy)
    driver.submit(0.01, long, short)
    done = driver.run().times(Kind.PREFILLED)
    assert done[short] < done[long]


def test_a_prompt_in_work_can_give_way_between_two_chunks():
    def short_ones_first(prompts, tokens):
        return sorted(((each, tokens) for each in prompts), key=lambda pair: pair[0].prompt_tokens > tokens)

    driven = Engine(spec(), Duty.PREFILL, turns=short_ones_first)
    driver = Driver(driven)
    long, short = job(3000), job(1000)
    driver.submit(0.0, long)
    driver.submit(0.05, short)
    driver.run(until=0.05)
    assert (driven.load(0.05).queued_tokens, driven.load(0.05).running_requests) == (4000, 1)
    done = driver.run().times(Kind.PREFILLED)
    assert done[short] == pytest.approx(2 * P.seconds(1000))
    rest = P.seconds(1000, 1000) + P.seconds(1000, 2000)
    assert done[long] == pytest.approx(2 * P.seconds(1000) + rest)
    assert driven.is_empty


def test_what_is_cached_is_not_computed_again():
    driver = Driver(engine(Duty.PREFILL))
    first, again, other = job(450, blocks=(1, 2, 3, 4)), job(450, blocks=(1, 2, 3, 4)), job(450, blocks=(1, 2, 9, 8))
    for at, each in enumerate((first, again, other)):
        driver.submit(float(at), each)
    done = driver.run().times(Kind.PREFILLED)
    assert [each.cached_tokens for each in (first, again, other)] == [0, 400, 200]
    assert done[again] == pytest.approx(1.0 + P.seconds(50, 400))


def test_the_last_token_is_computed_even_where_all_is_cached():
    driver = Driver(engine(Duty.PREFILL))
    first, again = job(200, blocks=(1, 2)), job(200, blocks=(1, 2))
    driver.submit(0.0, first)
    driver.submit(1.0, again)
    assert driver.run().times(Kind.PREFILLED)[again] == pytest.approx(1.0 + P.seconds(1, 199))


def test_blocks_of_the_second_tier_are_loaded_rather_than_computed():
    driven = engine(Duty.PREFILL, kv_tokens=500, host_tokens=1000, host_load_seconds=1e-5)
    driver = Driver(driven)
    first, filler, again = (
        job(400, blocks=(1, 2, 3, 4)),
        job(500, blocks=(5, 6, 7, 8, 9)),
        job(450, blocks=(1, 2, 3, 4)),
    )
    for at, each in enumerate((first, filler, again)):
        driver.submit(float(at), each)
    done = driver.run().times(Kind.PREFILLED)
    assert again.cached_tokens == 400
    assert done[again] == pytest.approx(2.0 + P.seconds(50, 400) + 400 * 1e-5)


def test_parked_kv_at_its_limit_lets_nothing_new_begin_until_it_is_taken():
    driven = engine(Duty.PREFILL, kv_tokens=2000, parked_share=0.5)
    driver = Driver(driven, take=False)
    first, second, third = job(600), job(600), job(600)
    driver.submit(0.0, first)
    driver.submit(1.0, second)
    driver.submit(2.0, third)
    driver.run()
    assert third not in driver.times(Kind.PREFILLED)
    assert (driven.load(3.0).parked_tokens, driven.load(3.0).queued_requests) == (1200, 1)
    driver.at(5.0, lambda: driven.bind(first))
    assert driver.run().times(Kind.PREFILLED)[third] == pytest.approx(5.0 + P.seconds(600))


def test_tokens_come_with_the_steps_of_the_batch():
    driver = Driver(engine(Duty.DECODE), transfer=0.5)
    only = job(1000, output=20)
    driver.submit(0.0, only)
    driver.run()
    steps = [D.seconds(1, 1000 + done) for done in range(20)]
    assert driver.times(Kind.ADMITTED)[only] == 0.0
    assert driver.times(Kind.FIRST)[only] == pytest.approx(0.5 + steps[0])
    assert driver.times(Kind.FINISHED)[only] == pytest.approx(0.5 + sum(steps))


def test_a_token_that_comes_with_the_kv_shows_on_joining_and_takes_no_step():
    driver = Driver(engine(Duty.DECODE), transfer=0.5)
    only, whole = job(1000, output=20, brought=1), job(500, output=1, brought=1)
    driver.submit(0.0, only)
    driver.submit(0.1, whole)
    driver.run()
    steps = [D.seconds(1, 1001 + done) for done in range(19)]
    assert driver.times(Kind.FIRST)[only] == pytest.approx(0.5)
    assert driver.times(Kind.FINISHED)[only] == pytest.approx(0.5 + sum(steps))
    assert 0.6 <= driver.times(Kind.FIRST)[whole] == driver.times(Kind.FINISHED)[whole] <= 0.6 + steps[-1]
    assert driver.engine.pool.used == pytest.approx(0.0)


def test_room_is_given_between_two_steps():
    driver = Driver(engine(Duty.DECODE))
    first, second = job(1000, output=100), job(500, output=5)
    driver.submit(0.0, first)
    driver.submit(0.101, second)
    driver.run()
    at = 0.0
    for done in itertools.count():
        at += D.seconds(1, 1000 + done)
        if at > 0.101:
            break
    assert driver.times(Kind.ADMITTED)[second] == pytest.approx(at)


def test_one_that_joins_waits_for_the_end_of_the_step_that_goes_on():
    driver = Driver(engine(Duty.DECODE))
    first, second = job(1000, output=100), job(500, output=5)
    driver.submit(0.0, first)
    driver.submit(0.101, second)
    driver.run()
    at, done = 0.0, 0
    while at < 0.101:
        at += D.seconds(1, 1000 + done)
        done += 1
    assert driver.times(Kind.FIRST)[second] == pytest.approx(at + D.seconds(2, 1500 + done))


def test_speculative_decoding_takes_fewer_steps():
    driver = Driver(engine(Duty.DECODE, accept_length=2.5))
    only = job(1000, output=100)
    driver.submit(0.0, only)
    seconds = sum(D.seconds(1, 0) + D.c * (1000 + 2.5 * step) for step in range(40))
    assert driver.run().times(Kind.FINISHED)[only] == pytest.approx(seconds)


def test_room_on_decode_is_given_in_turn_and_with_a_reserve():
    driven = engine(Duty.DECODE, kv_tokens=1000, reserve_tokens=100)
    driver = Driver(driven)
    first, large, small = job(500, output=50), job(400, output=10), job(100, output=10)
    driver.submit(0.0, first)
    driver.submit(0.01, large, small)
    driver.run()
    admitted = driver.times(Kind.ADMITTED)
    assert admitted[large] == admitted[small] == driver.times(Kind.FINISHED)[first]


def test_room_that_steps_have_taken_since_is_not_given_away():
    """The batch grows between two events; what asks for room in between sees how much."""
    driven = engine(Duty.DECODE, kv_tokens=1000, reserve_tokens=0)
    driver = Driver(driven)
    running, early, late = job(500, output=300), job(480, output=1), job(400, output=1)
    driver.submit(0.0, running)
    driver.submit(0.5, early)
    driver.submit(0.6, late)
    driver.run()
    # After 48 steps 548 tokens are held, so that 480 more have no room before the end, and 400 behind them neither.
    admitted = driver.times(Kind.ADMITTED)
    assert admitted[early] == admitted[late] == driver.times(Kind.FINISHED)[running]


def test_a_full_pool_takes_kv_from_those_that_have_generated_least():
    driven = engine(Duty.DECODE, kv_tokens=1000, reserve_tokens=0)
    driver = Driver(driven)
    old, new = job(450, output=300), job(450, output=300)
    driver.submit(0.0, old)
    driver.submit(0.2, new)
    driver.run()
    retracted = [each.job for each in driver.happened if each.kind is Kind.RETRACTED]
    assert retracted == [new]
    finished = driver.times(Kind.FINISHED)
    assert finished[old] < finished[new]
    assert new.prompt_tokens > 450
    assert new.prompt_tokens + new.output_tokens == 750


def test_an_engine_for_whole_requests_lets_prompts_go_first():
    driver = Driver(engine())
    running, late = job(100, output=100), job(1000, output=2)
    driver.submit(0.0, running)
    driver.submit(0.1, late)
    driver.run()
    begin = P.seconds(100)
    steps, at = 0, begin
    while at < 0.1:
        at += D.seconds(1, 101 + steps)
        steps += 1
    assert driver.times(Kind.PREFILLED)[late] == pytest.approx(at + P.seconds(1000))


def test_mixed_steps_decode_while_a_prompt_is_computed():
    driver = Driver(engine(mixed=True))
    running, late = job(100, output=50), job(3000, output=2)
    driver.submit(0.0, running)
    driver.submit(0.1, late)
    whole = driver.run().times(Kind.FINISHED)
    apart = Driver(engine())
    first, second = job(100, output=50), job(3000, output=2)
    apart.submit(0.0, first)
    apart.submit(0.1, second)
    assert whole[running] < apart.run().times(Kind.FINISHED)[first]


def test_one_token_is_finished_with_its_prefill():
    driver = Driver(engine())
    only = job(100, output=1)
    driver.submit(0.0, only)
    assert driver.run().times(Kind.FINISHED) == driver.times(Kind.PREFILLED) == {only: pytest.approx(P.seconds(100))}


def test_what_could_never_fit_is_refused_when_it_comes():
    with pytest.raises(ValueError, match="do not fit"):
        engine(Duty.DECODE, kv_tokens=100).submit(job(95, output=10))


def test_a_running_job_that_is_withdrawn_leaves_with_the_step():
    driven = engine(Duty.DECODE)
    driver = Driver(driven)
    leaves, stays = job(1000, output=500), job(1000, output=20)
    driver.submit(0.0, leaves, stays)
    driver.at(0.105, lambda: driven.withdraw(leaves))
    driver.run()
    assert leaves not in driver.times(Kind.FINISHED)
    pair, alone = [D.seconds(2, 2000 + 2 * step) for step in range(20)], 0.0
    at, done = 0.0, 0
    while at < 0.105:
        at += pair[done]
        done += 1
    alone = sum(D.seconds(1, 1000 + step) for step in range(done, 20))
    assert driver.times(Kind.FINISHED)[stays] == pytest.approx(at + alone)
    assert driven.is_empty


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.PARKED, Phase.LEAVING, Phase.ARRIVING])
def test_a_job_can_be_withdrawn_wherever_it_is(phase):
    duty = Duty.DECODE if phase is Phase.ARRIVING else Duty.PREFILL
    driven = engine(duty)
    driver = Driver(driven, take=False, transfer=100.0)
    first, only = job(5000), job(5000)
    driver.submit(0.0, *([first, only] if phase is Phase.WAITING else [only]))
    driver.run(until={Phase.WAITING: 0.05, Phase.PREFILL: 0.05, Phase.ARRIVING: 0.05}.get(phase, 50.0))
    if phase is Phase.LEAVING:
        driven.bind(only)
    assert only.phase is phase
    driver.at(60.0, lambda: driven.withdraw(only))
    if phase is Phase.WAITING:
        driver.at(61.0, lambda: driven.withdraw(first))
    driver.run(until=90.0)
    assert driven.is_empty
    assert driven.pool.used == 0


jobs = st.lists(
    st.tuples(
        st.integers(0, 3000).map(lambda ms: ms / 1000), st.integers(1, 900), st.integers(1, 300), st.integers(0, 3)
    ),
    min_size=1,
    max_size=12,
)
specs = st.builds(
    lambda kv, most, accept, mixed, host: replace(
        spec(), kv_tokens=kv, max_running=most, accept_length=accept, mixed=mixed, reserve_tokens=50, host_tokens=host
    ),
    st.integers(1300, 5000), st.integers(1, 12), st.sampled_from([1.0, 1.0, 2.3]), st.booleans(),
    st.sampled_from([0, 400]),
)  # fmt: skip


def driven_by(engine_spec: EngineSpec, duty: Duty, load, step_by_step: bool):
    made = Engine(engine_spec, duty)
    if step_by_step:
        whole = made._batch.begin

        def begin(at):
            run = whole(at)
            made._batch._planned = 1
            return run

        made._batch.begin = begin
    driver = Driver(made, transfer=0.03)
    for number, (at, prompt, output, family) in enumerate(load):
        driver.submit(at, job(prompt, output, tuple(family * 100 + n for n in range(prompt // 100)), tag=number))
    driver.run()
    return driver


@given(specs, st.sampled_from([Duty.DECODE, Duty.BOTH]), jobs)
@settings(max_examples=60, deadline=None)
def test_jumped_decode_steps_are_the_same_as_single_ones(engine_spec, duty, load):
    jumped = driven_by(engine_spec, duty, load, step_by_step=False)
    stepped = driven_by(engine_spec, duty, load, step_by_step=True)
    for kind in Kind:
        ours = {each.tag: at for each, at in jumped.times(kind).items()}
        theirs = {each.tag: at for each, at in stepped.times(kind).items()}
        assert ours == pytest.approx(theirs, abs=1e-7)


@given(specs, st.sampled_from(list(Duty)), jobs)
@settings(max_examples=60, deadline=None)
def test_every_job_ends_once_and_leaves_no_kv(engine_spec, duty, load):
    driver = driven_by(engine_spec, duty, load, step_by_step=False)
    last = Kind.PREFILLED if duty is Duty.PREFILL else Kind.FINISHED
    ended = [each.job.tag for each in driver.happened if each.kind is last]
    assert sorted(ended) == list(range(len(load)))
    assert driver.engine.is_empty
    assert driver.engine.pool.used == pytest.approx(0, abs=1e-6)
    assert driver.engine.next_at is None
    assert driver.engine.load(driver.now).kv_used_tokens == 0


@given(specs, st.sampled_from(list(Duty)), jobs)
@settings(max_examples=40, deadline=None)
def test_the_pool_never_holds_more_than_it_can(engine_spec, duty, load):
    made = Engine(engine_spec, duty)
    driver = Driver(made, transfer=0.03)
    seen = []
    for at, prompt, output, family in load:
        driver.submit(at, job(prompt, output, tuple(family * 100 + n for n in range(prompt // 100))))
    for tick in range(80):
        driver.at(tick * 0.05, lambda: seen.append(made.load(driver.now)))
    driver.run()
    assert all(each.kv_used_tokens + each.kv_evictable_tokens <= engine_spec.kv_tokens + 1 for each in seen)
    assert all(each.running_requests <= engine_spec.max_running for each in seen)


def test_the_load_tells_what_the_engine_has():
    driven = engine(Duty.DECODE, max_running=1)
    driver = Driver(driven)
    driver.submit(0.0, job(1000, output=1000), job(700, output=10))
    driver.run(until=0.0)
    load = driven.load(0.5)
    assert (load.running_requests, load.queued_requests, load.queued_tokens) == (1, 1, 700)
    steps, at = 0, 0.0
    while at + D.seconds(1, 1000 + steps) <= 0.5:
        at += D.seconds(1, 1000 + steps)
        steps += 1
    assert load.kv_used_tokens == 1000 + steps
    assert load.decode_step_seconds == pytest.approx(D.seconds(1, 1000 + steps))
    assert load.kv_high_water_tokens == 90_000


def test_busy_time_is_that_of_its_steps():
    driver = Driver(engine())
    driver.submit(0.0, job(100, output=10))
    driver.submit(5.0, job(100, output=10))
    driver.run()
    one = P.seconds(100) + sum(D.seconds(1, 101 + step) for step in range(9))
    assert driver.engine.busy_seconds(10.0) == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_tokens", 0),
        ("chunk_tokens", 0),
        ("high_water", 1.5),
        ("accept_length", 0.5),
        ("host_load_seconds", math.nan),
    ],
)
def test_an_impossible_engine_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        spec(**{field: value})
