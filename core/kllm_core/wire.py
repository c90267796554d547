"""How the words of the house are written in kllm.engine.v1, in both directions."""

from __future__ import annotations

import dataclasses

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import EngineLoad, InstanceState
from kllm_core.objectives import Binding, Role

ROLES = {Role.PREFILL: engine_pb2.ROLE_PREFILL, Role.DECODE: engine_pb2.ROLE_DECODE}
STATES = {
    InstanceState.SLOT: engine_pb2.INSTANCE_STATE_SLOT,
    InstanceState.GATED: engine_pb2.INSTANCE_STATE_GATED,
    InstanceState.STARTING: engine_pb2.INSTANCE_STATE_STARTING,
    InstanceState.SERVING: engine_pb2.INSTANCE_STATE_SERVING,
    InstanceState.DRAINING: engine_pb2.INSTANCE_STATE_DRAINING,
    InstanceState.FAILED: engine_pb2.INSTANCE_STATE_FAILED,
}
BINDINGS = {
    Binding.LATE: engine_pb2.BINDING_LATE,
    Binding.EARLY: engine_pb2.BINDING_EARLY,
    Binding.JUST_IN_TIME: engine_pb2.BINDING_JUST_IN_TIME,
}

# A newer neighbour may write numbers that are not in these: look them up with `get`.
ROLE_OF = {number: role for role, number in ROLES.items()}
STATE_OF = {number: state for state, number in STATES.items()}
BINDING_OF = {number: binding for binding, number in BINDINGS.items()}

_LOAD_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineLoad)) - {"age_seconds"}


def load_values(report: engine_pb2.LoadReport) -> dict[str, int | float]:
    """Fields of `EngineLoad` that a report tells, without their age; what it leaves out is missing."""
    return {told.name: value for told, value in report.ListFields() if told.name in _LOAD_FIELDS}
