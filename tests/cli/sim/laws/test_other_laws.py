import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of

from kllm.sim.laws.base import Arrival, Pool
from kllm.sim.laws.clairvoyant import Clairvoyant, ClairvoyantSettings
from kllm.sim.laws.hpa import Hpa, HpaSettings
from kllm.sim.laws.registry import build
from kllm.sim.laws.wva import Wva, WvaSettings


def test_hpa_doubles_with_the_load_and_shrinks_after_five_minutes():
    law = Hpa(setup_of(one=(1, 20)), HpaSettings(target=10.0))
    current, history = 1, {}
    for now in range(0, 901, 15):
        total = 20 if now < 300 else 5
        per_engine = [total // current] * current
        current = law.decide(seen(float(now), one=pool_of(*per_engine))).counts[Pool.ONE]
        history[now] = current
    assert history[0] == 2
    assert history[285] == 2
    assert history[570] == 2
    assert history[600] == 1


def test_hpa_judges_prefill_by_its_queue_and_decode_by_its_requests():
    law = Hpa(setup_of(prefill=(1, 20), decode=(1, 20)), HpaSettings())
    counts = law.decide(seen(0.0, prefill=pool_of({"queued_requests": 6}), decode=pool_of(40))).counts
    assert counts == {Pool.PREFILL: 3, Pool.DECODE: 2}


def kv(used):
    return {"kv_used_tokens": used, "kv_total_tokens": 1000}


def test_wva_counts_those_that_start_as_supply():
    law = Wva(setup_of(one=(1, 20)), WvaSettings(up_stabilisation=0.0))
    # Each supplies 800; 1,600 in use need 1,882, of which 1,600 are there: one more.
    assert law.decide(seen(0.0, one=pool_of(kv(800), kv(800)))).counts[Pool.ONE] == 3
    assert law.decide(seen(30.0, one=pool_of(kv(800), kv(800), starting=1))).counts[Pool.ONE] == 3


def test_wva_gives_up_whole_engines_of_spare_supply():
    law = Wva(setup_of(one=(1, 20)), WvaSettings(down_stabilisation=0.0))
    # 1,120 / 0.7 = 1,600 of 3,200: two are spare.
    assert law.decide(seen(0.0, one=pool_of(*([kv(280)] * 4)))).counts[Pool.ONE] == 2


def steady(rate, seconds, tokens, output):
    return tuple(Arrival(at / rate, tokens, output) for at in range(int(rate * seconds)))


def test_clairvoyant_asks_for_what_comes_as_early_as_a_start_takes_and_not_before():
    before = steady(2.0, 300, 1000, 10)
    burst = tuple(Arrival(300 + each.time, 1000, 10) for each in steady(20.0, 60, 1000, 10))
    arrivals = before + burst
    law = Clairvoyant(
        setup_of(prefill=(1, 20), decode=(1, 20), start_seconds=60.0, arrivals=arrivals), ClairvoyantSettings()
    )
    pools = {"prefill": pool_of(), "decode": pool_of()}
    counts = {now: law.decide(seen(float(now), **pools)).counts[Pool.PREFILL] for now in range(0, 400, 5)}
    assert counts[200] == 1
    assert counts[240] == 3  # 20 requests/s of 0.1 s at most 85 % busy
    assert counts[360] == 1


def test_clairvoyant_holds_decode_within_kv_and_tpot():
    arrivals = steady(10.0, 400, 1000, 1000)
    setup = setup_of(prefill=(1, 50), decode=(1, 50), tpot=0.05, kv_total_tokens=200_000, arrivals=arrivals)
    law = Clairvoyant(setup, ClairvoyantSettings())
    counts = law.decide(seen(200.0, prefill=pool_of(), decode=pool_of())).counts
    # Three engines keep up 16 ms, 10 + 0.1·53 ms a step, with 160 requests of 1,500 tokens. Two would need 24 ms, and
    # hold more than fits.
    assert counts[Pool.DECODE] == 3
    small = setup_of(prefill=(1, 50), decode=(1, 50), tpot=0.05, kv_total_tokens=60_000, arrivals=arrivals)
    counts = Clairvoyant(small, ClairvoyantSettings()).decide(seen(200.0, prefill=pool_of(), decode=pool_of())).counts
    assert counts[Pool.DECODE] > 3


@pytest.mark.parametrize(
    ("policy", "pools", "counts"),
    [
        ("static:3", {"one": (1, 8)}, {Pool.ONE: 3}),
        ("static:2,5", {"prefill": (1, 8), "decode": (1, 8)}, {Pool.PREFILL: 2, Pool.DECODE: 5}),
    ],
)
def test_static_counts_stay(policy, pools, counts):
    law = build(policy, setup_of(**pools))
    assert law.decide(seen(0.0, **{name: pool_of() for name in pools})).counts == counts


@pytest.mark.parametrize(
    ("policy", "knobs", "said"),
    [
        ("keda", {}, "there is no policy 'keda'; known are static"),
        ("hpa:3", {}, "there is no policy"),
        ("static", {}, "form static:P,D"),
        ("static:2", {}, "form static:P,D"),
        ("static:2,x", {}, "form static:P,D"),
        ("static:2,3", {"target": 1}, "static has no knobs"),
        ("hpa", {"targt": 1}, "hpa has no knob targt; it has metric, target"),
        ("hpa", {"target": "many"}, "hpa: target must be of the kind of 32.0"),
        ("hpa", {"target": 0}, "targets must be above 0"),
        ("hpa", {"metric": "cpu"}, "concurrency, queue"),
        ("dynamo", {"load": "maybe"}, "dynamo: load must be of the kind of False"),
        ("llm-d", {"up_pods": "1.5"}, "llm-d: up_pods must be"),
    ],
)
def test_a_wrong_policy_or_knob_is_named(policy, knobs, said):
    with pytest.raises(ValueError, match=said):
        build(policy, setup_of(prefill=(1, 8), decode=(1, 8)), knobs)


def test_knobs_are_taken_as_text_too():
    law = build("hpa", setup_of(one=(1, 8)), {"target": "5", "metric": "queue"})
    assert law.decide(seen(0.0, one=pool_of({"queued_requests": 20}))).counts[Pool.ONE] == 4
