import pytest
from cli.sim.laws.law_helpers import pool_of, seen, setup_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.sim.laws.base import Observation, Pool
from kllm.sim.laws.dynamo import Dynamo, DynamoSettings
from kllm.sim.laws.predictors import Kind, Predictor

PD = {"prefill": (1, 20), "decode": (1, 20)}
CONSTANT = DynamoSettings(predictor=Kind.CONSTANT)


def decide(law, *, rate, now=180.0, tokens=1000.0, output=100.0, ttft=None, tpot=None, prefill=(), decode=()):
    """Ask once, at the end of a throughput interval."""
    law.decide(seen(0.0, rate=0, prefill=pool_of(), decode=pool_of()))
    observation = seen(
        now, window=180.0, rate=rate, tokens=tokens, output=output, ttft=ttft, tpot=tpot,
        prefill=pool_of(*prefill), decode=pool_of(*decode),
    )  # fmt: skip
    return law.decide(observation).counts


def test_counts_are_the_predicted_rate_over_what_an_engine_carries():
    # Prefill: 10,000 tokens/s are 10 requests/s of 1,000. Decode: 250 requests in a step of 0.01 + 0.025 + 0.0026 s
    # fit 50 ms; the KV pool of 262,500 tokens holds 250 of 1,050: 250 / (100 · 0.0376) = 66 requests/s.
    law = Dynamo(setup_of(**PD, tpot=0.05, kv_total_tokens=262_500), CONSTANT)
    assert decide(law, rate=25.0) == {Pool.PREFILL: 3, Pool.DECODE: 1}
    law = Dynamo(setup_of(**PD, tpot=0.05, kv_total_tokens=262_500), CONSTANT)
    assert decide(law, rate=130.0) == {Pool.PREFILL: 13, Pool.DECODE: 2}


def test_cached_tokens_need_no_prefill():
    law = Dynamo(setup_of(**PD), CONSTANT)
    pools = {Pool.PREFILL: pool_of(), Pool.DECODE: pool_of()}
    observation = Observation(
        180.0, pools, window_seconds=180.0, arrived=180 * 40, input_tokens=1000.0, cached_share=0.5, output_tokens=10.0
    )
    assert law.decide(observation).counts[Pool.PREFILL] == 2  # 40 · 500 / 10,000


def test_more_measured_than_expected_tpot_tightens_decode():
    setup = setup_of(**PD, tpot=0.05)
    even = DynamoSettings(predictor=Kind.CONSTANT, correction=True)
    # 100 running expect 0.01 + 0.01 + 0.00105 s a token; twice that was measured: a limit of 25 ms.
    plain = decide(Dynamo(setup, CONSTANT), rate=300.0, tokens=1000.0, tpot=0.0421, decode=[100])
    corrected = decide(Dynamo(setup, even), rate=300.0, tokens=1000.0, tpot=0.0421, decode=[100])
    assert corrected[Pool.DECODE] > plain[Pool.DECODE]


def test_a_measured_tpot_of_nothing_corrects_nothing():
    corrected = Dynamo(setup_of(**PD, tpot=0.05), DynamoSettings(predictor=Kind.CONSTANT, correction=True))
    plain = Dynamo(setup_of(**PD, tpot=0.05), CONSTANT)
    assert decide(corrected, rate=300.0, tpot=0.0, decode=[100]) == decide(plain, rate=300.0, tpot=0.0, decode=[100])


def test_queueing_in_the_measured_ttft_adds_no_prefill_but_a_fast_one_spares_some():
    setup = setup_of(**PD)
    settings = DynamoSettings(predictor=Kind.CONSTANT, correction=True)
    slow = decide(Dynamo(setup, settings), rate=50.0, ttft=2.0)
    fast = decide(Dynamo(setup, settings), rate=50.0, ttft=0.05)
    assert slow[Pool.PREFILL] == 5
    assert fast[Pool.PREFILL] == 3  # half of the expected 0.1 s: half of the load


def busy(tokens):
    return {"queued_tokens": tokens, "running_requests": 1}


def test_one_more_comes_when_all_engines_are_over_and_not_when_one_is_under():
    law = Dynamo(setup_of(**PD), DynamoSettings(load=True, throughput=False))
    over = seen(5.0, prefill=pool_of(busy(40_000), busy(40_000)), decode=pool_of(1))
    assert law.decide(over).counts[Pool.PREFILL] == 3
    mixed = seen(10.0, prefill=pool_of(busy(40_000), busy(1_000)), decode=pool_of(1))
    assert law.decide(mixed).counts[Pool.PREFILL] == 2


def test_nothing_is_added_while_one_is_on_its_way():
    law = Dynamo(setup_of(**PD), DynamoSettings(load=True, throughput=False))
    view = pool_of(busy(40_000), busy(40_000), starting=1)
    assert law.decide(seen(5.0, prefill=view, decode=pool_of(1))).counts[Pool.PREFILL] == 3


@pytest.mark.parametrize(("tokens", "wanted"), [(11_000, 1), (12_500, 2)])
def test_one_goes_only_if_the_other_could_take_its_load(tokens, wanted):
    # Two engines: one alone has twice the queue; 0.8 of (3 s - 0.1 s) is 23,200 tokens.
    law = Dynamo(setup_of(**PD), DynamoSettings(load=True, throughput=False))
    view = pool_of(busy(tokens), busy(tokens))
    assert law.decide(seen(5.0, prefill=view, decode=pool_of(1))).counts[Pool.PREFILL] == wanted


def test_a_decode_engine_goes_only_if_the_kv_fits_on_the_others():
    law = Dynamo(setup_of(**PD), DynamoSettings(load=True, throughput=False))
    full = {"kv_used_tokens": 60, "kv_total_tokens": 100, "running_requests": 1}
    half = {"kv_used_tokens": 45, "kv_total_tokens": 100, "running_requests": 1}
    assert law.decide(seen(5.0, prefill=pool_of(1), decode=pool_of(full, full))).counts[Pool.DECODE] == 2
    assert law.decide(seen(10.0, prefill=pool_of(1), decode=pool_of(half, half))).counts[Pool.DECODE] == 1


def test_predicted_counts_are_the_floor_of_reactive_ones():
    law = Dynamo(setup_of(**PD), DynamoSettings(predictor=Kind.CONSTANT, load=True))
    idle = [busy(0)] * 5
    counts = decide(law, rate=45.0, prefill=idle, decode=[1])
    assert counts[Pool.PREFILL] == 5
    again = law.decide(seen(185.0, rate=1.0, prefill=pool_of(*idle), decode=pool_of(1))).counts
    assert again[Pool.PREFILL] == 5


def test_over_the_budget_both_shrink_in_proportion():
    law = Dynamo(setup_of(**PD, gpu_budget=12), CONSTANT)
    counts = decide(law, rate=190.0, output=1000.0)
    assert sum(counts.values()) <= 12
    assert min(counts.values()) >= 1


@settings(deadline=None)
@given(st.floats(0, 500), st.floats(1, 20_000), st.floats(1, 2000), st.one_of(st.none(), st.floats(0.001, 100)))
def test_counts_stay_within_bounds_and_budget_whatever_is_seen(rate, tokens, output, latency):
    settings = DynamoSettings(predictor=Kind.CONSTANT, load=True, correction=True)
    law = Dynamo(setup_of(**PD, gpu_budget=25), settings)
    counts = decide(
        law, rate=rate, tokens=tokens, output=output, ttft=latency, tpot=latency, prefill=[1, 2], decode=[0]
    )
    assert all(1 <= count <= 20 for count in counts.values())
    assert sum(counts.values()) <= 25


def test_one_pool_is_sized_by_the_whole_request():
    law = Dynamo(setup_of(one=(1, 50)), CONSTANT)
    law.decide(seen(0.0, rate=0, one=pool_of()))
    counts = law.decide(seen(180.0, window=180.0, rate=20.0, one=pool_of(1))).counts
    # Prefill alone needs two engines' time, and decode has to fit beside it.
    assert 3 <= counts[Pool.ONE] <= 6


@pytest.mark.parametrize("kind", list(Kind))
def test_a_flat_series_is_forecast_flat(kind):
    predictor = Predictor(kind)
    for _ in range(30):
        predictor.add(7.0)
    assert predictor.next() == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("constant", 20.0, 20.0), ("kalman", 20.2, 21.5), ("ar", 21.0, 21.0)]
)
def test_a_ramp_is_followed_by_those_that_know_a_trend(kind, least, most):
    predictor = Predictor(Kind(kind))
    for value in range(1, 21):
        predictor.add(float(value))
    assert least <= predictor.next() <= most


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=60), st.sampled_from(Kind))
def test_a_forecast_is_a_number_of_at_least_zero(values, kind):
    predictor = Predictor(kind)
    for value in values:
        predictor.add(value)
    assert 0 <= predictor.next() < 1e8


def test_zeros_before_the_first_traffic_are_left_out():
    predictor = Predictor(Kind.KALMAN)
    for value in (0.0, 0.0, 0.0, 5.0):
        predictor.add(value)
    assert predictor.next() == 5.0
