"""The words of the house and of kllm.engine.v1 stand for each other, all of them."""

from __future__ import annotations

import pytest

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Binding, Role
from kllm_core.wire import BINDING_OF, BINDINGS, ROLE_OF, ROLES, STATE_OF, STATES, load_values


@pytest.mark.parametrize(
    ("words", "numbers", "back", "enum"),
    [
        (Role, ROLES, ROLE_OF, engine_pb2.Role),
        (InstanceState, STATES, STATE_OF, engine_pb2.InstanceState),
        (Binding, BINDINGS, BINDING_OF, engine_pb2.Binding),
    ],
)
def test_each_word_has_its_number_and_only_the_unspecified_one_has_no_word(words, numbers, back, enum):
    assert {back[numbers[word]] for word in words} == set(words)
    assert set(enum.values()) - set(numbers.values()) == {0}


def test_a_load_of_nothing_is_told_and_what_is_left_out_is_not():
    report = engine_pb2.LoadReport(
        sequence=3, age_seconds=1.5, running_requests=0, kv_used_tokens=7, total_decode_tokens=9
    )
    assert load_values(report) == {"running_requests": 0, "kv_used_tokens": 7}
