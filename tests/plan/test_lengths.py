"""How much single prompts vary is told apart from how far means lie apart."""

import numpy as np
import pytest

from kllm_operator.plan.demand import Forecast, Totals
from kllm_operator.plan.lengths import Lengths
from kllm_operator.plan.outlook import Course

TICK = 5.0


def with_prompts(totals, prompts, *, told=True):
    return Totals(
        at=totals.at + TICK, seconds=totals.seconds + TICK, arrivals=totals.arrivals + len(prompts),
        prompt_tokens=totals.prompt_tokens + int(sum(prompts)), ended=totals.ended + len(prompts),
        output_tokens=totals.output_tokens + 100 * len(prompts),
        prompt_token_squares=totals.prompt_token_squares + int(sum(int(each) ** 2 for each in prompts)) * told,
    )  # fmt: skip


def seen(intervals, **options):
    lengths, before = Lengths(), Totals(0.0)
    for prompts in intervals:
        after = with_prompts(before, prompts, **options)
        lengths, before = lengths.seen(before, after), after
    return lengths


def test_the_variation_is_that_of_single_prompts():
    draw = np.random.default_rng(1).exponential(1000.0, (60, 30))

    assert seen(draw).variation == pytest.approx(1.0, abs=0.2)
    assert seen([[1000] * 30] * 60).variation == pytest.approx(0.0, abs=1e-9)


def test_older_prompts_count_less_than_newer_ones():
    mixed, alike = [[100, 1900] * 15] * 60, [[1000] * 30] * 400

    assert seen(mixed).variation > 0.7
    assert seen([*mixed, *alike]).variation < 0.05


@pytest.mark.parametrize("intervals", [[], [[]] * 50, [[1000, 5000]] * 5])
def test_of_few_prompts_nothing_is_said(intervals):
    assert seen(intervals).variation is None


def test_routers_that_tell_no_squares_teach_nothing():
    assert seen([[100, 1900] * 15] * 60, told=False) == Lengths()


def test_crowds_of_alike_prompts_make_queues_but_no_long_prompts():
    generator = np.random.default_rng(3)
    course, totals = Course(), Totals(0.0)
    for _ in range(120):
        # Forty of one length, and others of another one in the next interval.
        totals = with_prompts(totals, [int(generator.choice([500, 1500]))] * 40)
        course = course.observe(Forecast(requests_per_second=8.0, totals=totals), totals.at)
    ahead = course.ahead(10.0, 0.8)

    assert ahead.prompt_variation == pytest.approx(0.25, abs=0.05)
    assert ahead.work_variation > 5
