"""The rules of other routers choose as their formulas say."""

from __future__ import annotations

import itertools

import pytest
from sim.scenarios import ENGINE

from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm.sim.laws.base import Pool
from kllm.sim.routing_rules import CacheAware, DynamoCost, LlmdWeights, Rule
from kllm_core.engine_model.engine import Engine
from kllm_core.engine_model.job import Job
from kllm_core.engine_model.spec import Duty
from kllm_core.fleet import InstanceState

PROMPT = Flight(0, 0.0, 1000, 10, tuple(range(10)))


def instance(name: str, *, cached: int = 0, queued: int = 0, flights: int = 0) -> Instance:
    """With so many of the prompt's blocks cached, tokens queued, and requests."""
    made = Instance(name, Pool.PREFILL, now=0.0, is_slot=False)
    made.state, made.engine = InstanceState.SERVING, Engine(ENGINE, Duty.PREFILL)
    made.engine.pool.cache.pin(PROMPT.blocks[:cached])
    made.engine.pool.cache.unpin(PROMPT.blocks[:cached])
    if queued:
        made.engine.submit(Job(object(), queued, 1))
    for number in range(flights):
        made.flights[Flight(number, 0.0, 1, 1)] = None
    return made


def chosen(rule: Rule, *instances: Instance) -> str:
    return rule.prefill(PROMPT, instances, 0.0).id


def test_dynamo_adds_queued_tokens_to_what_is_not_cached():
    rule = DynamoCost(itertools.count())

    assert chosen(rule, instance("cached", cached=8, queued=700), instance("empty")) == "cached"
    assert chosen(rule, instance("cached", cached=8, queued=900), instance("empty")) == "empty"


def test_smg_takes_the_best_match_in_its_own_trees_unless_loads_differ_too_much():
    rule = CacheAware(itertools.count())
    first, second = instance("a"), instance("b")
    home = chosen(rule, first, second)

    assert {chosen(rule, first, second) for _ in range(4)} == {home}
    busy = first if home == "a" else second
    for number in range(65):
        busy.flights[Flight(number, 0.0, 1, 1)] = None
    assert chosen(rule, first, second) != home


def test_smg_sends_what_matches_too_little_to_the_smallest_tree():
    rule = CacheAware(itertools.count())
    first, second = instance("a"), instance("b")
    for number in range(4):
        other = Flight(number, 0.0, 1000, 10, tuple(range(100 * (number + 1), 100 * (number + 1) + 10)))
        rule.prefill(other, [first], 0.0)

    assert chosen(rule, first, second) == "b"


@pytest.mark.parametrize(("cached", "expected"), [(10, "cached"), (6, "empty")])
def test_llm_d_weighs_prefix_by_three_and_the_queue_by_two(cached, expected):
    busy = instance("cached", cached=cached, queued=2000)

    assert chosen(LlmdWeights(itertools.count()), busy, instance("empty")) == expected
