"""Where the simulated routers send prompts, each by its own rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.scenarios import ENGINE, poisson, scenario

from kllm.bench.plan import Planned
from kllm.sim.run import simulate
from kllm.sim.scenario import RouterSetup, Routing
from kllm_core.objectives import Binding
from kllm_router.scheduling.admission import AdmissionSettings
from kllm_router.scheduling.slack import SlackSettings

CACHED = [Routing.KLLM, Routing.DYNAMO, Routing.CACHE_AWARE, Routing.LLM_D]


def conversations(count: int, turns: int, *, seconds: float = 1.0) -> tuple[Planned, ...]:
    """Each turn's prompt is the one before and 200 tokens more."""
    return tuple(
        Planned(turn * count + each, (turn * count + each) * seconds, 400 + 200 * turn, 4,
                tuple(each * 1000 + block for block in range(4 + 2 * turn)))
        for turn in range(turns)
        for each in range(count)
    )  # fmt: skip


@pytest.mark.parametrize("routing", list(Routing))
def test_every_router_serves_every_request(routing):
    outcome = simulate(scenario(poisson(8.0, 30.0), "static:3,2", router=RouterSetup(routing=routing)))

    assert outcome.requests.finished == outcome.requests.arrived > 150


@pytest.mark.parametrize("routing", CACHED)
def test_routers_that_know_of_caches_send_a_turn_to_where_the_one_before_was(routing):
    load = conversations(5, 6)
    outcome = simulate(scenario(load, "static:4,2", router=RouterSetup(routing=routing)))
    blind = simulate(scenario(load, "static:4,2", router=RouterSetup(routing=Routing.ROUND_ROBIN)))

    reused = sum(400 + 200 * (turn - 1) for turn in range(1, 6)) / sum(400 + 200 * turn for turn in range(6))
    assert outcome.cached_share == pytest.approx(reused, rel=0.03)
    assert blind.cached_share < 0.8 * reused


def burst(prefix: int, count: int, *, rate: float) -> tuple[Planned, ...]:
    """Prompts of 8,000 tokens that begin with the same 7,500, and 500 of their own."""
    return tuple(
        Planned(n, 1.0 + n / rate, 8000, 2, (*range(prefix, prefix + 75), *(10_000 * (n + 1) + b for b in range(5))))
        for n in range(count)
    )


def test_a_prefix_that_all_use_is_computed_on_further_instances_before_one_is_overrun():
    # One instance could compute 13 of them a second, and 30 come.
    load = burst(0, 600, rate=30.0)
    engine = replace(ENGINE, kv_tokens=400_000)
    outcome = simulate(scenario(load, "static:4,4", engine=engine))

    assert outcome.cached_share > 0.9
    assert outcome.stages["queue"].p90 < 0.5


def test_prompts_that_come_together_and_begin_alike_are_computed_once():
    load = tuple(replace(each, at=1.0 + 0.001 * each.index) for each in burst(0, 4, rate=1.0))
    outcome = simulate(scenario(load, "static:4,4", engine=replace(ENGINE, chunk_tokens=8000)))

    # The first one computes what is alike, the others their own 500 tokens.
    assert outcome.cached_share == pytest.approx(3 * 7500 / 32_000, abs=0.01)


def test_just_in_time_kv_waits_for_no_step_and_all_ends_the_same():
    load = poisson(5.0, 60.0, prompt=2000, output=20)
    late, in_time = (
        simulate(scenario(load, "static:3,3", router=RouterSetup(binding=binding)))
        for binding in (Binding.LATE, Binding.JUST_IN_TIME)
    )

    assert in_time.requests == late.requests
    assert in_time.output_tokens == late.output_tokens
    # KV that was asked for late waits for the step that its prefill instance has begun meanwhile.
    assert in_time.ttft.mean < late.ttft.mean - 0.02
    assert in_time.ttft.p95 < late.ttft.p95 - 0.05


def test_admission_by_slack_keeps_those_that_are_in_on_time():
    load = poisson(45.0, 60.0)
    once = RouterSetup(admission=AdmissionSettings(slack=SlackSettings(ttft_seconds=1.0)))
    free = simulate(scenario(load, "static:3,4"))
    kept = simulate(scenario(load, "static:3,4", router=once))

    assert free.attainment.both < 0.3
    assert kept.attainment.both > 1.3 * free.attainment.both
    assert kept.attainment.both > 0.5
    assert kept.ttft.p95 < 1.3
