"""What the agent knows of its instance: state, facts, start phases."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import InstanceState
from kllm_core.objectives import Binding, Role
from kllm_core.wire import BINDINGS, ROLES, STATES
from kllm_engine.agent.changes import Changes

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """What holds for one server process.

    Attributes:
        incarnation: new for every server process.
        http_address: host:port of the engine's HTTP API.
        binding_reason: why Late is missing in `bindings`; empty when it is there.
        pace: how long steps are made to last; empty when they are as they are.
        flip_obstacle: why it cannot switch roles; empty when it can.
    """

    incarnation: int
    http_address: str
    bootstrap_host: str
    bootstrap_port: int
    page_size: int
    kv_type: str
    context_tokens: int
    kv_total_tokens: int
    max_running_requests: int
    engine_version: str
    bindings: tuple[Binding, ...]
    binding_reason: str
    pace: str = ""
    flip_obstacle: str = ""


@dataclass(frozen=True)
class Phase:
    """One step of the start."""

    name: str
    seconds: float


class Instance:
    """State of one instance; its only owner is the supervisor, everyone else reads.

    Attributes:
        role: None as long as a slot has not been told.
        incarnation: of the server process, 0 before there is one.
        changes: notified when something changed that subscribers of the load should hear soon.
    """

    def __init__(self, instance_id: str, *, service: str, model_name: str, role: Role | None) -> None:
        self.instance_id = instance_id
        self.service = service
        self.model_name = model_name
        self.role = role
        self.state = InstanceState.STARTING
        self.message = "no server yet"
        self.incarnation = 0
        self.facts: InstanceFacts | None = None
        self.phases: tuple[Phase, ...] = ()
        self.changes = Changes()

    def move(self, state: InstanceState, message: str) -> None:
        """Enter a state; does nothing when already there for the same reason."""
        if (state, message) == (self.state, self.message):
            return
        _log.info("instance state", instance=self.instance_id, before=self.state, now=state, message=message)
        self.state = state
        self.message = message
        self.changes.notify()

    def describe(self) -> engine_pb2.Instance | None:
        """The contract's message; None before the first server is up."""
        facts = self.facts
        if facts is None or self.role is None:
            return None
        return engine_pb2.Instance(
            instance_id=self.instance_id,
            service=self.service,
            role=ROLES[self.role],
            state=STATES[self.state],
            message=self.message,
            incarnation=facts.incarnation,
            http_address=facts.http_address,
            bootstrap_host=facts.bootstrap_host,
            bootstrap_port=facts.bootstrap_port,
            model_name=self.model_name,
            page_size=facts.page_size,
            kv_type=facts.kv_type,
            context_tokens=facts.context_tokens,
            kv_total_tokens=facts.kv_total_tokens,
            max_running_requests=facts.max_running_requests,
            engine_version=facts.engine_version,
            bindings=[BINDINGS[binding] for binding in facts.bindings],
            binding_reason=facts.binding_reason,
            flippable=not facts.flip_obstacle,
            pacing=facts.pace,
            start_phases=[engine_pb2.StartPhase(name=phase.name, seconds=phase.seconds) for phase in self.phases],
        )
