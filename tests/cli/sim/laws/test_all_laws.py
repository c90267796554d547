"""What every law must keep, whatever it sees."""

import sys
from pathlib import Path

import pytest
from cli.sim.laws.law_helpers import latencies, setup_of
from hypothesis import given, settings
from hypothesis import strategies as st
from purity import check_quiet_and_small, imported

import kllm.sim.laws
from kllm.sim.laws.base import Arrival, EngineView, Observation, Pool, PoolView
from kllm.sim.laws.registry import POLICIES, build

LAWS = [name for name in POLICIES if name != "static"]
MODULES = sorted(Path(kllm.sim.laws.__file__).parent.glob("*.py"))
IMPURE = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}
ARRIVALS = tuple(Arrival(at * 2.0, 3000, 400) for at in range(300))

ENGINES = st.builds(
    EngineView,
    queued_requests=st.integers(0, 500),
    running_requests=st.integers(0, 500),
    queued_tokens=st.integers(0, 10**7),
    kv_used_tokens=st.integers(0, 10**6),
    kv_total_tokens=st.sampled_from([0, 10**5, 10**6]),
    utilisation=st.floats(0, 1),
)
POOLS = st.builds(
    PoolView,
    engines=st.lists(ENGINES, max_size=8).map(tuple),
    starting=st.integers(0, 5),
    desired=st.integers(0, 12),
    draining=st.integers(0, 3),
    waiting_requests=st.integers(0, 50),
    waiting_tokens=st.integers(0, 10**5),
)
SECONDS = st.one_of(st.none(), st.floats(0, 1000)).map(latencies)


@st.composite
def histories(draw, pools):
    now, history = 0.0, [Observation(0.0, {pool: PoolView() for pool in pools})]
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([5.0, 15.0, 30.0, 180.0]))
        history.append(
            Observation(
                now,
                {pool: draw(POOLS) for pool in pools},
                window_seconds=draw(st.sampled_from([0.0, 15.0, 180.0])),
                arrived=draw(st.integers(0, 2000)),
                input_tokens=draw(st.one_of(st.none(), st.floats(1, 1e5))),
                cached_share=draw(st.floats(0, 1)),
                output_tokens=draw(st.one_of(st.none(), st.floats(1, 1e4))),
                ttft=draw(SECONDS),
                tpot=draw(SECONDS),
            )
        )
    return history


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("bounds", [{"one": (2, 9)}, {"prefill": (1, 6), "decode": (2, 9)}], ids=["one", "pd"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_counts_are_whole_and_within_bounds(name, bounds, data):
    setup = setup_of(**bounds, arrivals=ARRIVALS, gpu_budget=15)
    law = build(name, setup, {"load": True, "correction": True} if name == "dynamo" else {})
    for observation in data.draw(histories(list(setup.bounds))):
        decision = law.decide(observation)
        assert set(decision.counts) == set(setup.bounds)
        assert decision.reason
        for pool, count in decision.counts.items():
            assert isinstance(count, int)
            assert setup.bounds[pool].least <= count <= setup.bounds[pool].most


@pytest.mark.parametrize("name", LAWS)
def test_the_first_answer_is_the_least_when_nothing_is_there(name):
    law = build(name, setup_of(prefill=(1, 6), decode=(2, 9)))
    first = law.decide(Observation(0.0, {Pool.PREFILL: PoolView(), Pool.DECODE: PoolView()}))
    assert first.counts == {Pool.PREFILL: 1, Pool.DECODE: 2}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_asked_at_a_positive_interval(name):
    law = build(name, setup_of(one=(1, 6)))
    assert law.interval_seconds > 0
    assert law.window_seconds > 0


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_is_pure_and_holds_one_noun(path):
    for name in imported(path):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names and top not in IMPURE
        own = name.startswith("kllm.sim.laws.") or name in {"kllm_core.objectives", "kllm_core.timing"}
        assert standard or own, f"{path.name} imports {name}"
    check_quiet_and_small(path)
