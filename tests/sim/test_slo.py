"""The operator's own loop on a simulated fleet."""

from dataclasses import replace

import pytest
from sim.scenarios import ENGINE, joined, poisson, scenario

from kllm.sim import planning
from kllm.sim.laws.base import Pool
from kllm.sim.run import simulate
from kllm.sim.scenario import Failure, Failures, StartTimes
from kllm_core.objectives import Objectives
from kllm_operator.loop.control import Control
from kllm_operator.loop.settings import LoopSettings

QUICK = LoopSettings().with_values({"stabilisation_seconds": 20, "rebalance_seconds": 10})
WAVE = joined(poisson(1.0, 40, seed=1), poisson(16.0, 60, seed=2, start=40), poisson(0.5, 140, seed=3, start=100))


def slo(load, **fields):
    return simulate(scenario(load, "slo", loop=QUICK, **({"starts": StartTimes(new=5.0)} | fields)))


def test_the_loop_is_the_operators_own():
    assert issubclass(planning._Watched, Control)
    overridden = set(vars(planning._Watched)) - {"__module__", "__doc__", "__annotations__", "fault", "on_fault"}
    assert overridden == {"tick"}


def test_a_wave_of_prompts_adds_prefill_and_lets_it_go_again():
    outcome = slo(WAVE)
    prefill = [point.serving["prefill"] for point in outcome.series]
    assert max(prefill) >= 2
    assert prefill[-1] == 1
    assert outcome.requests.finished == outcome.requests.arrived
    up = next(each for each in outcome.decisions if each.reason == "ScaledUp")
    assert up.loads is not None
    assert up.loads["prefill"]["terms"]["QueueAndPrefill"]["predicted"] > 1
    assert up.message.startswith("prefill 1 to ")
    assert any(point.loads["prefill"] for point in outcome.series)


def test_the_loop_decides_the_same_for_the_same_seed():
    fields = {"starts": StartTimes(new=5.0, spread=0.3), "failures": Failures(per_hour=30.0)}
    assert slo(WAVE, **fields).document(with_speed=False) == slo(WAVE, **fields).document(with_speed=False)


def test_what_dies_is_stopped_and_started_again():
    outcome = slo(poisson(1.0, 120), failures=Failures(scripted=(Failure(30.0, Pool.DECODE),)))
    assert outcome.failures == 1
    assert outcome.starts >= 1
    assert outcome.series[-1].serving["decode"] >= 1
    assert outcome.requests.finished + outcome.requests.rejected == outcome.requests.arrived


def test_slots_make_starts_quick_and_are_paid_for():
    times = StartTimes(new=60.0, slot=2.0, prepare=20.0)
    plain, ready = slo(WAVE, starts=times), slo(WAVE, starts=times, slots=1)
    assert ready.attainment.both > plain.attainment.both
    assert any(point.idle["prefill"] for point in ready.series)

    def first(outcome):
        return next(point.at for point in outcome.series if point.serving["prefill"] > 1)

    assert first(ready) < first(plain) - 30
    assert ready.gpu_seconds > plain.gpu_seconds


def test_instances_flip_when_the_work_turns():
    prompts = poisson(20.0, 150, prompt=1000, output=2, seed=1)
    answers = poisson(3.0, 200, prompt=100, output=1500, seed=2, start=150)
    outcome = slo(
        joined(prompts, answers), gpu_budget=5, starts=StartTimes(new=120.0, switch=1.0), initial=2, engine=ENGINE,
        objectives=Objectives(2.0, 0.05, 90),
    )  # fmt: skip
    assert outcome.flips >= 1
    assert outcome.peak <= 5


def test_engines_that_cannot_switch_never_flip():
    outcome = slo(WAVE, engine=replace(ENGINE, flippable=False), gpu_budget=4, initial=2)
    assert outcome.flips == 0


def test_timing_is_learned_where_it_is_not_known():
    outcome = slo(WAVE, warm=False)
    assert outcome.attainment.both > 0.5
    assert any(each.reason == "ScaledUp" for each in outcome.decisions)


def test_a_stopped_run_ends_the_loop_too():
    asked = []
    outcome = simulate(scenario(WAVE, "slo", loop=QUICK), stop=lambda: asked.append(True) or len(asked) > 4)
    assert outcome.is_interrupted
    assert outcome.simulated_seconds == pytest.approx(25.0)


def test_a_fault_of_the_loop_ends_the_run(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("no such plan")

    monkeypatch.setattr("kllm_operator.loop.deciding.plan", broken)
    with pytest.raises(ZeroDivisionError, match="no such plan"):
        slo(poisson(1.0, 30))
