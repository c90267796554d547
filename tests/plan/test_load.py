"""Load per role: which term decides, and what must not count."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_helpers import IDLE, NO_TRAFFIC, D, P, fleet, measured, model, traffic

from kllm_core.fleet import EngineLoad
from kllm_core.objectives import LoadSource
from kllm_operator.plan.demand import Forecast, Stages
from kllm_operator.plan.role_load import Term
from kllm_operator.plan.settings import LoadSettings

BAD = [None, math.nan, math.inf, -math.inf, -1.0]


def test_measured_queue_and_prefill_are_judged_by_prefills_share_of_ttft():
    load = model(fleet(), stages=Stages(queue=measured(0.5), prefill=measured(0.2))).now(P)

    assert load.load.value == pytest.approx(1.0)
    assert (load.term, load.load.source) == (Term.QUEUE_AND_PREFILL, LoadSource.MEASURED)


def test_what_was_measured_together_counts_before_the_sum_of_its_parts():
    parts = {"queue": measured(0.6), "prefill": measured(0.6), "bind": measured(0.2), "transfer": measured(0.2)}
    judged = model(fleet(), stages=Stages(**parts, prefilled=measured(0.7), handover=measured(0.3)))

    assert judged.now(P).load.value == pytest.approx(0.7 / 0.7)
    assert judged.now(D).load.value == pytest.approx(0.3 / 0.3)


@pytest.mark.parametrize(("way", "share"), [(0.2, 0.8), (0.01, 0.9), (0.6, 0.7)])
def test_a_short_way_to_decode_leaves_prefill_more_of_ttft(way, share):
    judged = model(fleet(), stages=Stages(prefilled=measured(0.5), handover=measured(way)))

    assert judged.now(P).load.value == pytest.approx(0.5 / share)


def test_time_lost_to_parked_kv_is_charged_to_decode():
    stages = Stages(queue=measured(0.9), prefill=measured(0.1), blocked=measured(0.9))
    judged = model(fleet(), stages=stages)

    assert judged.now(P).load.value == pytest.approx(0.1 / 0.7)
    assert judged.now(D).load.value == pytest.approx(0.9 / 0.3)
    assert judged.now(D).term is Term.HANDOVER


def test_the_queue_of_a_prefill_instance_that_parked_kv_blocks_is_charged_to_decode():
    stuck = replace(IDLE, queued_uncached_tokens=50_000, queued_requests=50, parked_requests=5, parked_tokens=9)
    stuck = replace(stuck, parked_limit_tokens=9)
    busy = replace(IDLE, running_requests=10)
    judged = model(fleet(p_load=stuck, d_load=busy), Forecast(requests_per_second=0.0, output_tokens=100))

    assert judged.now(P).load.value == 0
    assert judged.now(D).term is Term.HANDOVER
    assert judged.now(D).strain > 1


def test_queued_tokens_make_prefills_predicted_load():
    load = model(fleet(p_load=replace(IDLE, queued_uncached_tokens=7000))).now(P)

    assert load.load.value == pytest.approx(0.71 / 0.7)
    assert load.load.source is LoadSource.PREDICTED


def test_a_forecast_rate_above_what_prefill_can_do_is_overload_and_a_number():
    load = model(fleet(), traffic(1000.0)).now(P)

    assert 1 < load.load.value <= 1000


def test_a_queue_that_is_worked_off_before_a_new_instance_comes_is_no_forecast_load():
    queued = replace(IDLE, queued_uncached_tokens=7000)
    judged = model(fleet(p_load=queued), traffic(1.0))

    assert judged.now(P).strain > 1 > judged.at(P, 1).strain
    soon = LoadSettings(horizon_seconds=1.0)
    assert model(fleet(p_load=queued), traffic(8.0), settings=soon).at(P, 1).strain > 1


def test_decode_is_judged_by_tpot_over_its_objective():
    load = model(fleet(d_load=replace(IDLE, running_requests=200))).now(D)

    assert load.load.value == pytest.approx(0.09 / 0.05)
    assert load.term is Term.TPOT


def test_decode_is_judged_by_kv_over_the_high_water():
    full = replace(IDLE, running_requests=1, kv_used_tokens=1500, kv_high_water_tokens=1000)
    load = model(fleet(d_load=full)).now(D)

    assert (load.load.value, load.term) == (pytest.approx(1.5), Term.KV)


def test_forecast_kv_counts_before_it_is_there():
    empty = replace(IDLE, kv_high_water_tokens=1000)

    assert model(fleet(d_load=empty), traffic(5.0)).now(D).term is Term.KV


def test_a_slow_way_to_decode_is_judged_by_decodes_share_of_ttft():
    stages = Stages(bind=measured(0.1), admission=measured(0.3), transfer=measured(0.1), first_step=measured(0.1))

    assert model(fleet(), stages=stages).now(D).load.value == pytest.approx(0.6 / 0.3)


@pytest.mark.parametrize(
    ("oldest", "newest", "samples"), [(31.0, 1.0, 50), (20.0, 11.0, 50), (20.0, 1.0, 4), (math.nan, 1.0, 50)]
)
def test_a_measurement_from_before_the_change_of_capacity_or_stale_or_of_few_adds_nothing(oldest, newest, samples):
    stages = Stages(queue=measured(9.0, oldest, newest, samples))
    load = model(fleet(), stages=stages, changed=30.0).now(P)

    assert load.load.measured is None
    assert load.load.value == 0


@pytest.mark.parametrize("value", BAD)
def test_what_is_not_a_number_is_unknown(value):
    forecast = Forecast(value, value, value, value, value, value if value is not None else 1.0)
    stages = Stages(queue=measured(math.nan if value is None else value), tpot=measured(value or math.nan))
    silent = fleet(p_load=None, d_load=None)

    for role in (P, D):
        load = model(silent, forecast, stages).now(role)
        assert load.load.value is None
        assert load.load.source is LoadSource.UNKNOWN
        assert not load.complete


def test_no_traffic_is_load_zero_and_complete_while_silence_is_neither():
    assert model(fleet(), NO_TRAFFIC).now(P).load.value == 0
    assert model(fleet(), NO_TRAFFIC).now(P).complete
    assert not model(fleet(), Forecast()).now(P).complete
    assert not model(fleet(p_load=replace(IDLE, age_seconds=11.0)), NO_TRAFFIC).now(P).complete
    assert not model(fleet(p_load=EngineLoad(1.0)), NO_TRAFFIC).now(P).complete


def test_more_instances_share_only_what_exceeds_the_own_prefill():
    stages = Stages(queue=measured(2.0), prefill=measured(0.11))
    load = model(fleet(prefill=2), traffic(0.1), stages).at(P, 4)

    assert load.load.measured == pytest.approx((0.11 + 2.0 / 2) / 0.7)


def test_an_objective_that_no_count_can_meet_is_limited_by_its_floor():
    load = model(fleet(), traffic(0.01, uncached=10_000.0)).now(P)

    assert load.load.value > 1
    assert load.strain < 1


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0, 500), st.floats(1, 20_000), st.floats(1, 4000), st.integers(0, 10**6), st.integers(0, 2000),
    st.floats(0, 100), st.integers(1, 40), st.integers(1, 8),
)  # fmt: skip
def test_load_is_finite_and_never_rises_with_more_instances(rate, prompt, output, queued, running, slow, count, there):
    loaded = replace(IDLE, queued_uncached_tokens=queued, running_requests=running, kv_used_tokens=running * 10)
    judged = model(
        fleet(there, there, replace(loaded), replace(loaded, kv_high_water_tokens=5000)),
        traffic(rate, prompt, output),
        Stages(queue=measured(slow), tpot=measured(slow / 100), admission=measured(slow)),
    )

    for role in (P, D):
        fewer, more = judged.at(role, count), judged.at(role, count + 1)
        assert 0 <= more.strain <= fewer.strain * (1 + 1e-9) <= 1001


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 500), st.floats(0, 100), st.integers(1, 20))
def test_load_never_falls_with_more_traffic(rate, more, count):
    for role in (P, D):
        low = model(fleet(), traffic(rate)).at(role, count).strain
        assert low <= model(fleet(), traffic(rate + more)).at(role, count).strain * (1 + 1e-9)
