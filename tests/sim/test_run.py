"""Whole runs: where time goes, how requests end, and that nothing is lost or made up."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim.scenarios import ENGINE, TIMING, joined, poisson, scenario

from kllm.bench.plan import Planned
from kllm.sim.laws.base import Pool
from kllm.sim.run import simulate
from kllm.sim.scenario import (
    Failure,
    Failures,
    Link,
    PrefillOrder,
    RouterSetup,
    Routing,
    ScenarioError,
    StartTimes,
)
from kllm_core.objectives import Binding
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming

P, D = TIMING.prefill, TIMING.decode
QUICK_LINK = Link(base_seconds=0.02, seconds_per_token=1e-5, shared=True)


def max_of(outcome):
    return outcome.stages["transfer"].p99


def alone(prompt=1000, output=50, **fields):
    return simulate(scenario((Planned(0, 2.0, prompt, output),), **fields))


def test_a_request_alone_takes_its_prefill_its_transfer_and_its_steps():
    outcome = alone(link=QUICK_LINK)
    steps = [D.seconds(1, 1001 + done) for done in range(49)]
    assert outcome.ttft.p50 == pytest.approx(P.seconds(1000) + 0.02 + 1000 * 1e-5)
    assert outcome.tpot.p50 == pytest.approx(sum(steps) / 49)
    assert outcome.stages["prefill"].p50 == pytest.approx(P.seconds(1000))
    assert outcome.stages["transfer"].p50 == pytest.approx(0.03)
    assert outcome.stages["queue"].p50 == outcome.stages["bind"].p50 == pytest.approx(0.0)
    assert outcome.attainment.both == 1.0


def test_with_one_pool_the_first_token_comes_with_the_prefill():
    outcome = alone(policy="static:1")
    assert outcome.ttft.p50 == pytest.approx(P.seconds(1000))
    assert outcome.tpot.p50 == pytest.approx(sum(D.seconds(1, 1001 + done) for done in range(49)) / 49)


def test_early_binding_asks_decode_first_and_ends_the_same():
    early = alone(link=QUICK_LINK, router=RouterSetup(binding=Binding.EARLY))
    assert early.ttft.p50 == pytest.approx(alone(link=QUICK_LINK).ttft.p50)


def test_transfers_at_one_time_share_a_link_only_where_links_are_shared():
    load = tuple(Planned(index, 0.0, 1000, 2) for index in range(4))
    slow = Link(0.0, 1e-3)
    plain = simulate(scenario(load, link=replace(slow, shared=False)))
    shared = simulate(scenario(load, link=slow))
    # The first prompt is computed alone, and sent after the step of the others: all four are sent at one time.
    assert max_of(shared) - max_of(plain) == pytest.approx(4.0 - 1.0)


def test_prefill_sends_what_was_bound_late_after_the_step_that_goes_on():
    load = (Planned(0, 0.0, 1000, 2), Planned(1, 0.01, 2000, 2))
    late = simulate(scenario(load, link=Link(0.0, 0.0)))
    early = simulate(scenario(load, link=Link(0.0, 0.0), router=RouterSetup(binding=Binding.EARLY)))
    assert max_of(late) == pytest.approx(P.seconds(2000), rel=0.02)
    assert late.ttft.p50 - early.ttft.p50 == pytest.approx(P.seconds(2000) / 2, rel=0.02)


def test_short_prompts_pass_long_ones_in_the_engines_own_order():
    load = (Planned(0, 0.0, 16_000, 2), *(Planned(number, 0.1 * number, 500, 2) for number in range(1, 8)))
    plain, fair = (simulate(scenario(load, prefill_order=order)) for order in PrefillOrder)
    assert fair.ttft.p50 < 0.7 * plain.ttft.p50
    assert fair.requests.finished == plain.requests.finished == 8


def test_messages_between_router_and_engines_take_their_time():
    plain, slow = alone(link=QUICK_LINK), alone(link=QUICK_LINK, router=RouterSetup(hop_seconds=0.1))
    assert slow.stages["queue"].p50 == pytest.approx(0.2)
    assert slow.stages["transfer"].p50 == pytest.approx(plain.stages["transfer"].p50 + 0.2)
    assert slow.ttft.p50 == pytest.approx(plain.ttft.p50 + 0.4)
    assert slow.tpot.p50 == pytest.approx(plain.tpot.p50)
    one = alone(policy="static:1", router=RouterSetup(hop_seconds=0.1))
    assert one.ttft.p50 == pytest.approx(P.seconds(1000) + 0.2)


def test_an_answer_of_one_token_takes_no_decode_step():
    outcome = alone(output=1, link=QUICK_LINK)
    assert outcome.requests.finished == 1
    assert outcome.ttft.p50 == pytest.approx(P.seconds(1000) + 0.03)


def test_a_single_server_waits_as_the_formula_of_its_queue_says():
    """M/D/1: mean wait = utilisation · service / (2 · (1 - utilisation))."""
    service, rate = P.seconds(1000), 6.0
    engine = replace(ENGINE, chunk_tokens=1000)
    load = poisson(rate, 4000, output=1, seed=3)
    outcome = simulate(scenario(load, "static:1", engine=engine, router=RouterSetup(routing=Routing.LEAST_LOAD)))
    used = len(load) / 4000 * service
    assert outcome.stages["queue"].mean == pytest.approx(used * service / (2 * (1 - used)), rel=0.06)


def test_a_decode_batch_settles_where_littles_law_says():
    """In the mean batch = x·a / (1 - x·g), with x steps asked for per second and g = b + c·context per sequence."""
    load = poisson(6.0, 400, prompt=200, output=200, seed=5)
    outcome = simulate(scenario(load, "static:2,1", sample_seconds=1.0))
    steps = len(load) / 400 * 200
    batch = steps * D.a / (1 - steps * (D.b + D.c * 300))
    running = [point.running["decode"] for point in outcome.series if 40 < point.at < 400]
    assert sum(running) / len(running) == pytest.approx(batch, rel=0.04)


def test_steps_with_the_same_batch_are_not_gone_through_one_by_one():
    short, long = (alone(output=tokens, duration=100.0).speed.events for tokens in (500, 5000))
    assert short == long


def test_caches_spare_what_conversations_have_in_common():
    turns = [(0.0, 500, (1, 2, 3, 4, 5)), (5.0, 800, (1, 2, 3, 4, 5, 6, 7, 8)), (10.0, 400, (1, 2, 9, 8))]
    load = tuple(Planned(index, at, tokens, 5, blocks) for index, (at, tokens, blocks) in enumerate(turns))
    outcome = simulate(scenario(load))
    assert outcome.cached_share == pytest.approx((0 + 500 + 200) / 1700)


def test_the_router_sends_a_conversation_to_where_its_cache_is():
    families = tuple(
        Planned(index, index * 0.5, 1000, 5, tuple(family * 100 + block for block in range(10)))
        for index, family in enumerate([0, 1, 2, 3] * 8)
    )
    kllm = simulate(scenario(families, "static:3,1"))
    blind = simulate(scenario(families, "static:3,1", router=RouterSetup(routing=Routing.ROUND_ROBIN)))
    # Each of the four is computed once by kLLM; in turn, each comes to all of the three instances.
    assert kllm.cached_share == pytest.approx(28 / 32, abs=0.01)
    assert blind.cached_share == pytest.approx(20 / 32, abs=0.01)


loads = st.lists(
    st.tuples(st.integers(0, 8000), st.integers(1, 3000), st.integers(1, 120), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)


_ADMITTED_WHILE_ITS_PREFILL_INSTANCE_DIES = [
    (0, 1, 1, 0), (0, 1, 1, 0), (17, 4, 13, 2), (46, 130, 91, 2), (185, 2662, 120, 2), (244, 3000, 120, 2),
]  # fmt: skip


@given(
    loads, st.sampled_from(["static:1,1", "static:2,2", "static:2"]), st.sampled_from(list(Binding)), st.booleans(),
    st.sampled_from([0.0, 0.03]), st.sampled_from(list(PrefillOrder)),
)  # fmt: skip
@example(_ADMITTED_WHILE_ITS_PREFILL_INSTANCE_DIES, "static:2,2", Binding.EARLY, True, 0.0, PrefillOrder.FCFS)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_nothing_is_left(load, policy, binding, fails, hop, order):
    ordered = sorted(load)
    requests = tuple(
        Planned(index, at / 1000, prompt, output, tuple(family * 100 + n for n in range(prompt // 100)))
        for index, (at, prompt, output, family) in enumerate(ordered)
    )
    pool = Pool.ONE if policy == "static:2" else Pool.DECODE
    deaths = tuple(
        Failure(at, each) for at in (1.0, 3.0) for each in {pool, Pool.ONE if pool is Pool.ONE else Pool.PREFILL}
    )
    engine = replace(ENGINE, kv_tokens=6000, reserve_tokens=20)
    outcome = simulate(
        scenario(
            requests, policy, engine=engine, starts=StartTimes(new=1.0),
            router=RouterSetup(binding=binding, hop_seconds=hop),
            failures=Failures(scripted=deaths if fails else ()), prefill_order=order,
        )
    )  # fmt: skip
    told = outcome.requests
    assert told.arrived == len(requests) == told.finished + told.rejected + told.failed
    assert told.unfinished == 0
    assert outcome.series == () or all(point.kv_use for point in outcome.series)
    if not fails:
        assert told.finished == len(requests)
        assert outcome.output_tokens == sum(each.output_tokens for each in requests)


def test_gpu_time_is_that_of_all_instances_until_the_end():
    outcome = simulate(scenario(poisson(2.0, 100), "static:3,2", gpus=4))
    assert outcome.pool_gpu_seconds["prefill"] == pytest.approx(12 * outcome.simulated_seconds)
    assert outcome.gpu_seconds == pytest.approx(20 * outcome.simulated_seconds)
    assert outcome.mean_replicas == pytest.approx({"prefill": 3.0, "decode": 2.0})
    assert outcome.peak == 20


def test_only_what_comes_after_the_warm_up_counts():
    load = joined(poisson(40.0, 20, seed=1), poisson(1.0, 100, seed=2, start=100))
    whole = simulate(scenario(load, "static:1,1"))
    late = simulate(scenario(load, "static:1,1", count_from=100.0))
    assert whole.attainment.both < 0.6
    assert late.attainment.both > 0.95
    assert late.requests.arrived == sum(each.at >= 100 for each in load)
    assert late.gpu_seconds == pytest.approx(2 * (whole.simulated_seconds - 100))


def test_the_same_seed_has_the_same_outcome_and_another_one_another():
    made = scenario(
        poisson(6.0, 120), "hpa", starts=StartTimes(new=10.0, spread=0.5), failures=Failures(per_hour=60.0), seed=1
    )
    first, second = simulate(made), simulate(made)
    assert first.document(with_speed=False) == second.document(with_speed=False)
    assert first.failures > 0
    other = simulate(replace(made, seed=2))
    assert other.document(with_speed=False) != first.document(with_speed=False)


def test_a_decode_instance_that_dies_ends_no_answer():
    load = (Planned(0, 0.0, 1000, 400),)
    whole = simulate(scenario(load, "static:1,1"))
    death = Failures(scripted=(Failure(2.0, Pool.DECODE),))
    broken = simulate(scenario(load, "static:1,1", failures=death, starts=StartTimes(new=0.0)))
    assert (broken.requests.finished, broken.requests.moved, broken.failures) == (1, 1, 1)
    assert broken.ttft.p50 == pytest.approx(whole.ttft.p50)
    # What it had generated is computed as a prompt, and not generated again.
    again = P.seconds(1000 + 180) + 0.05
    assert broken.tpot.p50 * 399 == pytest.approx(whole.tpot.p50 * 399 + again, abs=0.1)


def test_a_prefill_instance_that_dies_is_replaced_by_another():
    load = (Planned(0, 0.0, 20_000, 10),)
    outcome = simulate(scenario(load, "static:2,1", failures=Failures(scripted=(Failure(0.5, Pool.PREFILL),))))
    assert (outcome.requests.finished, outcome.requests.moved) == (1, 1)


def test_a_request_whose_instances_keep_dying_fails():
    deaths = tuple(Failure(2.0 + 3.0 * number, Pool.DECODE) for number in range(8))
    outcome = simulate(
        scenario(
            (Planned(0, 0.0, 1000, 2000),), "static:1,2", failures=Failures(scripted=deaths),
            router=RouterSetup(attempts=3), starts=StartTimes(new=1.0),
        )
    )  # fmt: skip
    assert (outcome.requests.failed, outcome.requests.moved) == (1, 2)
    assert outcome.attainment.tpot == 0.0


def test_what_dies_is_started_again():
    outcome = simulate(
        scenario(
            poisson(2.0, 60), "static:1,1", starts=StartTimes(new=3.0),
            failures=Failures(scripted=(Failure(20.0, Pool.DECODE),)),
        )
    )  # fmt: skip
    assert outcome.starts == 1
    assert outcome.requests.finished == outcome.requests.arrived


def test_no_instance_for_too_long_rejects():
    load = poisson(2.0, 30)
    outcome = simulate(
        scenario(load, "static:1,1", initial=0, starts=StartTimes(new=15.0), router=RouterSetup(wait_seconds=5.0))
    )
    early = sum(each.at < 10.0 for each in load)
    assert outcome.requests.rejected == pytest.approx(early, abs=1)
    assert outcome.attainment.both <= 1 - outcome.requests.rejected / len(load)


def test_a_request_that_fits_nowhere_is_rejected():
    outcome = simulate(scenario((Planned(0, 0.0, 190_000, 20_000), Planned(1, 0.1, 1000, 10))))
    assert (outcome.requests.rejected, outcome.requests.finished) == (1, 1)


def test_what_has_not_ended_in_time_is_unfinished_and_missed():
    outcome = simulate(scenario((Planned(0, 0.0, 1000, 5000),), grace=10.0))
    assert outcome.requests.unfinished == 1
    assert outcome.attainment.both == outcome.attainment.ttft == 0.0
    assert outcome.simulated_seconds == pytest.approx(10.0)


def test_a_stopped_run_keeps_what_it_has():
    asked = []

    def stop():
        asked.append(True)
        return len(asked) > 4

    told = []
    outcome = simulate(scenario(poisson(2.0, 600)), progress=lambda at, ended: told.append((at, ended)), stop=stop)
    assert outcome.is_interrupted
    assert 0 < outcome.requests.finished < outcome.requests.arrived + 1
    assert outcome.simulated_seconds == pytest.approx(25.0)
    assert told[0] == (5.0, pytest.approx(10, abs=8))
    assert told[-1][0] == 25.0


def test_a_law_starts_what_it_wants_and_drains_what_is_too_much():
    load = joined(
        poisson(1.0, 100, seed=1), poisson(14.0, 200, seed=2, start=100), poisson(0.5, 900, seed=3, start=300)
    )
    outcome = simulate(scenario(load, "hpa", starts=StartTimes(new=20.0)))
    serving = [point.serving["prefill"] for point in outcome.series]
    assert outcome.starts >= 1
    assert max(serving) > serving[-1]
    assert outcome.requests.finished + outcome.requests.rejected == outcome.requests.arrived
    assert outcome.decisions[0].at == 0.0
    assert all(decision.reason for decision in outcome.decisions)
    first = next(each for each in outcome.decisions if each.desired["prefill"] > 1)
    up = next(point.at for point in outcome.series if point.serving["prefill"] > 1)
    assert up >= first.at + 20.0 - 10.0


def test_starting_instances_are_paid_for_and_draining_ones_until_they_are_gone():
    load = joined(poisson(14.0, 60, seed=2), poisson(0.2, 600, seed=3, start=60))
    outcome = simulate(scenario(load, "hpa", starts=StartTimes(new=30.0), sample_seconds=1.0))
    held = sum(
        sum(point.serving.values()) + sum(point.starting.values()) + sum(point.draining.values())
        for point in outcome.series
    )
    assert outcome.gpu_seconds == pytest.approx(held, rel=0.02)


def test_a_budget_is_never_exceeded():
    outcome = simulate(scenario(poisson(20.0, 120), "hpa", gpu_budget=5, starts=StartTimes(new=5.0)))
    assert outcome.peak <= 5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"load": ()}, "load"),
        ({"load": (Planned(0, 5.0, 1, 1), Planned(1, 4.0, 1, 1))}, "request 1"),
        ({"load": (Planned(0, float("nan"), 1, 1),)}, "request 0"),
        ({"load": (Planned(0, 0.0, 0, 1),)}, "request 0"),
        ({"least": 3, "most": 2}, "least 3"),
        ({"initial": 99}, "initial"),
        ({"sample_seconds": 0.0}, "sample_seconds"),
        ({"grace": -1.0}, "grace"),
    ],
)
def test_an_impossible_scenario_names_the_field(fields, named):
    with pytest.raises(ScenarioError, match=named):
        scenario(**({"load": (Planned(0, 0.0, 10, 10),)} | fields))


def test_free_steps_are_no_engine():
    nothing = EngineTiming(PrefillTiming(0, 0, 0), DecodeTiming(0, 0, 0))
    with pytest.raises(ValueError, match="timing"):
        replace(ENGINE, timing=nothing)
