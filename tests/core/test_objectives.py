"""Objectives and load on one scale."""

import math

import pytest

from kllm_core.objectives import Load, LoadSource, Objectives, Role


@pytest.mark.parametrize(
    ("predicted", "measured", "value", "source"),
    [
        (0.5, 0.8, 0.8, LoadSource.MEASURED),
        (0.9, 0.8, 0.9, LoadSource.PREDICTED),
        (0.7, 0.7, 0.7, LoadSource.PREDICTED),
        (None, 0.8, 0.8, LoadSource.MEASURED),
        (0.3, math.nan, 0.3, LoadSource.PREDICTED),
        (math.inf, -1.0, None, LoadSource.UNKNOWN),
        (None, None, None, LoadSource.UNKNOWN),
    ],
)
def test_load_is_the_larger_of_the_numbers_that_are_known(predicted, measured, value, source):
    load = Load.of(predicted=predicted, measured=measured)

    assert (load.value, load.source) == (value, source)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_objectives_must_be_positive_times(wrong):
    with pytest.raises(ValueError, match="ttft_seconds"):
        Objectives(wrong, 0.1)
    with pytest.raises(ValueError, match="tpot_seconds"):
        Objectives(1.0, wrong)


@pytest.mark.parametrize("percentile", [0, 100])
def test_percentile_outside_1_to_99_is_refused(percentile):
    with pytest.raises(ValueError, match="percentile"):
        Objectives(1.0, 0.1, percentile)


def test_each_role_is_the_other_of_the_other():
    assert Role.PREFILL.other is Role.DECODE
    assert Role.DECODE.other is Role.PREFILL
