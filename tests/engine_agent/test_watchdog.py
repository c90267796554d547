from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kllm_engine.agent.watchdog import Health, Limits, Observation, Watchdog, judge

LIMITS = Limits(life=3.0, grace=5.0, step=120.0)
WELL = {"heartbeat_age": 0.5, "loop_age": 0.5, "http_age": 1.0, "has_work": True}
HUNG = WELL | {"heartbeat_age": 3.0}


@pytest.mark.parametrize(
    ("seen", "health"),
    [
        ({}, Health.WELL),
        ({"heartbeat_age": 2.9}, Health.WELL),
        ({"heartbeat_age": 3.0}, Health.HUNG),
        ({"loop_age": 119.0}, Health.WELL),
        ({"loop_age": 120.0}, Health.HUNG),
        ({"loop_age": 500.0, "has_work": False}, Health.WELL),
        ({"stopped_process": "sglang::scheduler (7)"}, Health.SUSPECT),
        ({"stopped_process": "sglang::scheduler (7)", "stopped_seconds": 3.0}, Health.HUNG),
        ({"http_age": 6.0}, Health.SUSPECT),
        ({"http_age": 12.0}, Health.HUNG),
    ],
)
def test_verdicts_at_the_limits(seen: dict[str, object], health: Health) -> None:
    assert judge(Observation(**(WELL | seen)), LIMITS).health is health


def test_an_engine_that_hangs_for_longer_than_the_grace_is_lost() -> None:
    watchdog = Watchdog(LIMITS)
    seen = Observation(**HUNG)
    verdicts = [watchdog.judge(seen, now=now).health for now in (100.0, 104.9, 105.0)]
    assert verdicts == [Health.HUNG, Health.HUNG, Health.LOST]


def test_an_engine_that_came_back_gets_the_whole_grace_again() -> None:
    watchdog = Watchdog(LIMITS)
    watchdog.judge(Observation(**HUNG), now=100.0)
    assert watchdog.judge(Observation(**WELL), now=104.0).health is Health.WELL
    assert watchdog.judge(Observation(**HUNG), now=106.0).health is Health.HUNG


@given(st.floats(0, 300), st.floats(0, 300), st.floats(0, 300), st.booleans())
def test_every_bad_verdict_says_why(heartbeat_age: float, loop_age: float, http_age: float, has_work: bool) -> None:
    seen = Observation(heartbeat_age=heartbeat_age, loop_age=loop_age, http_age=http_age, has_work=has_work)
    verdict = judge(seen, LIMITS)
    assert (verdict.health is Health.WELL) == (verdict.message == "")
