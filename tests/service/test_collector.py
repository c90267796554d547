"""Metrics of each service are its spec and its status, and go with it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from render.engine_helpers import service

from kllm_core.kinds.status import ServiceStatus
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS
from kllm_core.objectives import Role
from kllm_operator.service.collector import ServiceCollector, bound_of
from kllm_router.metrics import RouterMetrics

WHO = {"namespace": "team", "service": "chat"}
STATUS = ServiceStatus.model_validate(
    {
        "conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": "t", "reason": "Starting", "message": ""}
        ],
        "prefill": {
            "desired": 3,
            "ready": 2,
            "slots": 1,
            "slotsWarming": 4,
            "load": {"valueMilli": 1250, "measuredMilli": 1250, "source": "Measured"},
            "startMilliseconds": 7300,
        },
    }
)


def registry(*told):
    made = CollectorRegistry()
    made.register(ServiceCollector(lambda: told))
    return made


def value(name, **more):
    return registry((service(), STATUS)).get_sample_value(f"kllm_operator_{name}", {**WHO, **more})


def test_objectives_are_told_in_seconds_with_the_bucket_that_stands_for_them():
    assert value("objective_seconds", objective="ttft", le="1.0") == 1.0
    assert value("objective_seconds", objective="tpot", le="0.15") == 0.15
    assert value("objective_percentile_ratio") == 0.9


def test_a_bucket_of_that_name_is_one_of_the_routers():
    text = RouterMetrics()
    buckets = {
        sample.labels["le"]
        for family in text.registry.collect()
        for sample in family.samples
        if sample.name == "kllm_router_request_ttft_seconds_bucket"
    }

    assert {bound_of(seconds) for seconds in (0.0004, 0.9, 1.0, 1.0001, 77.0, 500.0)} <= buckets


@pytest.mark.parametrize(("seconds", "bound"), [(0.0001, "0.001"), (1.0, "1.0"), (1.01, "1.25"), (3600, "+Inf")])
def test_an_objective_between_two_bounds_takes_the_upper_one(seconds, bound):
    assert bound_of(seconds) == bound
    assert len(LATENCY_BOUNDS_SECONDS) > 10


def test_load_is_a_ratio_and_what_is_not_known_is_not_told():
    assert value("pool_load_ratio", role="prefill", source="decided") == 1.25
    assert value("pool_load_ratio", role="prefill", source="measured") == 1.25
    assert value("pool_load_ratio", role="prefill", source="predicted") is None
    assert value("pool_load_ratio", role="decode", source="decided") is None


def test_instances_are_told_by_state():
    assert value("pool_instances", role="prefill", state="desired") == 3
    assert value("pool_instances", role="prefill", state="ready") == 2
    assert value("pool_instances", role="prefill", state="slots_warming") == 4
    assert value("pool_instances", role="prefill", state="failed") == 0
    assert value("pool_last_start_seconds", role="prefill") == 7.3


def test_a_condition_is_told_with_the_status_that_it_has():
    assert value("condition", type="Ready", status="False") == 1
    assert value("condition", type="Ready", status="True") is None


def test_a_standalone_pool_is_told_like_the_role_of_a_service():
    made = CollectorRegistry()
    made.register(ServiceCollector(list, lambda: [(("team", "pair"), Role.PREFILL, STATUS.prefill)]))
    who = {"namespace": "team", "service": "pair", "role": "prefill"}

    assert made.get_sample_value("kllm_operator_pool_load_ratio", {**who, "source": "decided"}) == 1.25
    assert made.get_sample_value("kllm_operator_pool_instances", {**who, "state": "ready"}) == 2
    assert b"objective_seconds{" not in generate_latest(made)


def test_a_service_that_is_gone_leaves_nothing_behind():
    told = [(service(), STATUS)]
    made = CollectorRegistry()
    made.register(ServiceCollector(lambda: told))
    assert b'service="chat"' in generate_latest(made)

    told.clear()

    assert b'service="chat"' not in generate_latest(made)
