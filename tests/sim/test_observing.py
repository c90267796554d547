"""What a scaling law is shown of a simulated service."""

import pytest
from sim.scenarios import TIMING, poisson, scenario

from kllm.bench.plan import Planned
from kllm.sim import reactive
from kllm.sim.laws.base import Counts, Pool
from kllm.sim.run import simulate
from kllm.sim.scenario import StartTimes

P = TIMING.prefill


class Watcher:
    """A law that keeps what it is shown, and wants what a test says."""

    interval_seconds, window_seconds = 10.0, 20.0

    def __init__(self, wanted):
        self.wanted, self.seen = wanted, []

    def decide(self, observation):
        self.seen.append(observation)
        return Counts(dict(self.wanted(observation)), "Watched", f"at {observation.time}")


@pytest.fixture
def watching(monkeypatch):
    def run(load, wanted=lambda observation: {Pool.PREFILL: 1, Pool.DECODE: 1}, **fields):
        law = Watcher(wanted)
        monkeypatch.setattr(reactive.registry, "build", lambda policy, setup, knobs: law)
        return law.seen, simulate(scenario(load, "watched", one=False, **fields))

    return run


def test_the_first_question_is_put_before_anything_serves(watching):
    seen, outcome = watching(poisson(1.0, 30))
    assert seen[0].time == 0.0
    assert all(view.serving == 0 for view in seen[0].pools.values())
    assert [each.time for each in seen[1:4]] == [10.0, 20.0, 30.0]
    assert [decision.at for decision in outcome.decisions] == [0.0]


def test_the_window_is_the_laws_own(watching):
    load = tuple(Planned(number, number * 1.0 + 0.5, 100 * (number + 1), 11) for number in range(60))
    seen, _ = watching(load)
    young, later = seen[1], seen[4]
    assert (young.window_seconds, young.arrived, young.input_tokens) == (10.0, 10, 550.0)
    assert (later.time, later.window_seconds, later.arrived) == (40.0, 20.0, 20)
    assert later.input_tokens == pytest.approx(sum(100 * (number + 1) for number in range(20, 40)) / 20)
    assert later.requests_per_second == pytest.approx(1.0)
    assert later.output_tokens == 11.0


def test_latencies_are_of_first_tokens_and_of_ends_in_the_window(watching):
    load = (Planned(0, 1.0, 1000, 1200), Planned(1, 12.0, 1000, 2))
    seen, _ = watching(load, duration=60.0)
    first, second, third = seen[1:4]
    assert (first.ttft.samples, first.tpot) == (1, None)
    transfer = 0.01 + 1000 * 5e-6
    assert first.ttft.mean == pytest.approx(P.seconds(1000) + transfer)
    assert second.ttft.samples == 2
    assert second.tpot.samples == 2
    assert third.ttft.samples == 1
    assert seen[4].ttft is None


def test_engines_are_shown_as_they_are(watching):
    load = tuple(Planned(number, 9.0, 20_000, 50) for number in range(5))
    seen, _ = watching(load)
    engine = seen[1].pools[Pool.PREFILL].engines[0]
    assert engine.running_requests == 1
    assert engine.queued_requests == 4
    # The first prompt is in work for a second: two of its steps are over.
    done = next(n for n in range(6) if sum(P.seconds(4096, 4096 * step) for step in range(n + 1)) > 1.0)
    assert engine.queued_tokens == 100_000 - 4096 * done
    assert engine.kv_total_tokens == 200_000
    assert engine.utilisation == pytest.approx(0.1)


def test_what_the_router_holds_and_what_starts_is_shown(watching):
    def wanted(observation):
        return {Pool.PREFILL: 0 if observation.time < 10 else 2, Pool.DECODE: 1}

    load = tuple(Planned(number, 18.0, 300, 5) for number in range(3))
    seen, outcome = watching(load, wanted, least=0, starts=StartTimes(new=15.0))
    view = seen[2].pools[Pool.PREFILL]
    assert (view.serving, view.starting, view.desired) == (0, 2, 2)
    assert (view.waiting_requests, view.waiting_tokens) == (3, 900)
    assert outcome.starts == 2
    assert outcome.requests.rejected == 3


def test_what_starts_is_given_up_before_what_serves_and_the_least_busy_drains_first(watching):
    counts = {10.0: 3, 20.0: 2, 30.0: 1}

    def wanted(observation):
        return {Pool.PREFILL: 1, Pool.DECODE: 2 if observation.time < 10 else counts.get(observation.time, 1)}

    load = tuple(Planned(number, 5.0 + number, 100, 3000) for number in range(3))
    _, outcome = watching(load, wanted, starts=StartTimes(new=60.0), sample_seconds=1.0)
    at = {point.at: point for point in outcome.series}
    assert (at[15.0].serving["decode"], at[15.0].starting["decode"]) == (2, 1)
    assert (at[25.0].serving["decode"], at[25.0].starting["decode"], outcome.cancelled) == (2, 0, 1)
    assert (at[31.0].serving["decode"], at[31.0].draining["decode"]) == (1, 1)
    assert at[31.0].running["decode"] == 2
    assert outcome.requests.finished == 3
