from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kllm_engine.agent.watchdog import Health, Limits, Observation, judge

LIMITS = Limits(heartbeat=3.0, step=120.0)
WELL = {"heartbeat_age": 0.5, "loop_age": 0.5, "http_age": 1.0, "has_work": True}


@pytest.mark.parametrize(
    ("seen", "health"),
    [
        ({}, Health.WELL),
        ({"heartbeat_age": 3.0}, Health.SUSPECT),
        ({"heartbeat_age": 6.0}, Health.HUNG),
        ({"loop_age": 119.0}, Health.WELL),
        ({"loop_age": 120.0}, Health.HUNG),
        ({"loop_age": 500.0, "has_work": False}, Health.WELL),
        ({"stopped_process": "sglang::scheduler (7)"}, Health.SUSPECT),
        ({"stopped_process": "sglang::scheduler (7)", "stopped_seconds": 3.0}, Health.HUNG),
        ({"http_age": 15.0}, Health.SUSPECT),
        ({"http_age": 45.0}, Health.HUNG),
    ],
)
def test_verdicts_at_the_limits(seen: dict[str, object], health: Health) -> None:
    assert judge(Observation(**(WELL | seen)), LIMITS).health is health


@given(st.floats(0, 300), st.floats(0, 300), st.floats(0, 300), st.booleans())
def test_every_bad_verdict_says_why(heartbeat_age: float, loop_age: float, http_age: float, has_work: bool) -> None:
    seen = Observation(heartbeat_age=heartbeat_age, loop_age=loop_age, http_age=http_age, has_work=has_work)
    verdict = judge(seen, LIMITS)
    assert (verdict.health is Health.WELL) == (verdict.message == "")
