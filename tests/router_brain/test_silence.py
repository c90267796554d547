from __future__ import annotations

import pytest

from kllm_core.fleet import EngineLoad
from kllm_router.scheduling.silence import Awaited, Signs, has_lost

WORK = ("running_requests", "queued_requests", "parked_requests", "transferring_requests", "retracted_requests")


def signs(*, age: float = 0.1, stepped: float | None = None, **load: float) -> Signs:
    return Signs(EngineLoad(age_seconds=age, **dict.fromkeys(WORK, 0) | load), age, stepped)


def lost(seen: Signs, awaited: Awaited = Awaited.ANSWER, *, quiet: float = 4.0) -> bool:
    return has_lost(seen, quiet_seconds=quiet, awaited=awaited)


@pytest.mark.parametrize("awaited", list(Awaited))
def test_an_engine_without_work_does_not_have_the_request(awaited):
    assert lost(signs(), awaited)


@pytest.mark.parametrize("awaited", [Awaited.HANDOVER, Awaited.ANSWER, Awaited.TOKENS])
@pytest.mark.parametrize("name", WORK)
def test_an_engine_with_work_may_have_it(name, awaited):
    assert not lost(signs(**{name: 1}), awaited)


@pytest.mark.parametrize(("name", "expected"), [(name, name in {WORK[2], WORK[3]}) for name in WORK])
def test_what_is_to_be_computed_is_not_among_what_is_parked(name, expected):
    assert lost(signs(**{name: 1}), Awaited.KV) is expected


def test_a_load_that_is_unknown_or_older_than_the_request_proves_nothing():
    assert not lost(Signs(None))
    assert not lost(signs(age=3.5))
    assert not lost(Signs(EngineLoad(age_seconds=0.1), 0.1))


def test_a_stream_that_gets_nothing_while_the_engine_goes_on_with_others_is_lost():
    busy = {"running_requests": 2, "decode_step_seconds": 0.1, "stepped": 0.2}
    assert lost(signs(**busy), Awaited.TOKENS)
    assert not lost(signs(**busy), Awaited.ANSWER)
    for change in (
        {"decode_step_seconds": 0.3},
        {"stepped": 2.0},
        {"retracted_requests": 1},
        {"queued_requests": 1},
        {"transferring_requests": 1},
    ):
        assert not lost(signs(**busy | change), Awaited.TOKENS)
