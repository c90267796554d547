"""Snapshots and steps."""

import pytest

from kllm_core.fleet import Fleet, Instance, InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts


def test_only_serving_instances_of_the_role_take_requests():
    states = [InstanceState.SERVING, InstanceState.DRAINING, InstanceState.STARTING, InstanceState.FAILED]
    instances = [Instance(f"p{n}", Role.PREFILL, state) for n, state in enumerate(states)]
    instances.append(Instance("d0", Role.DECODE, InstanceState.SERVING))
    fleet = Fleet(0.0, {instance.id: instance for instance in instances})

    assert [instance.id for instance in fleet.serving(Role.PREFILL)] == ["p0"]
    assert [instance.id for instance in fleet.serving(Role.DECODE)] == ["d0"]
    assert len(list(fleet.of(Role.PREFILL))) == 4


def test_desired_counts_are_never_negative():
    with pytest.raises(ValueError, match="negative"):
        DesiredCounts(-1, 1, "Test", "test")


def test_desired_counts_are_looked_up_by_role():
    counts = DesiredCounts(2, 3, "Test", "test")

    assert (counts.of(Role.PREFILL), counts.of(Role.DECODE)) == (2, 3)
