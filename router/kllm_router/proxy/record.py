"""What the router knows of one instance."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.fleet import EngineLoad, Instance, InstanceState
from kllm_core.objectives import Role
from kllm_core.wire import BINDING_OF, ROLE_OF, STATE_OF, load_values
from kllm_router.interfaces import Endpoint
from kllm_router.scheduling.decode import DecodeCandidate
from kllm_router.scheduling.prefill import PrefillCandidate
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch
from kllm_router.scheduling.share import NO_SHARE, Share
from kllm_router.scheduling.silence import Signs


@dataclass
class _Sent:
    """A request of this router on the instance."""

    tokens: int
    at: float
    reported: bool = False


@dataclass
class Record:
    """One instance, as its agent last told it, with what this router has sent there since.

    Attributes:
        taken_at: when the engine's numbers were true, on the router's monotonic clock.
        heard_at: when its agent last said anything.
        lost: its agent's streams broke, and it did not come back in time.
        silent: its agent lives, but the engine gave no sign of life for too long.
        stepped_at: when its count of computed tokens last grew.
        problem: why there is no word from its agent, for people.
    """

    instance: Instance
    agent: str
    endpoint: Endpoint | None = None
    taken_at: float | None = None
    heard_at: float | None = None
    connected: bool = False
    lost: bool = False
    silent: bool = False
    stepped_at: float | None = None
    problem: str = "not connected yet"
    message: str = ""
    model_name: str = ""
    kv_total_tokens: int | None = None
    _decode_tokens: int = 0
    _load_values: dict[str, Any] = field(default_factory=dict)
    _sent: dict[str, _Sent] = field(default_factory=dict)
    _unreported: deque[_Sent] = field(default_factory=deque)
    _unreported_tokens: int = 0
    _unreported_requests: int = 0

    @property
    def id(self) -> str:
        """Its id."""
        return self.instance.id

    @property
    def in_flight(self) -> int:
        """Requests of this router that it has."""
        return len(self._sent)

    def learn_facts(self, facts: engine_pb2.Instance) -> bool:
        """Take over what holds for one incarnation; say whether the incarnation changed."""
        changed = facts.incarnation != self.instance.incarnation
        if changed:
            self.taken_at = self.stepped_at = None
            self.silent, self._decode_tokens = False, 0
        self.message, self.model_name = facts.message, facts.model_name
        self.kv_total_tokens = facts.kv_total_tokens or None
        self.endpoint = _endpoint(facts, ROLE_OF.get(facts.role, self.instance.role))
        self.instance = dataclasses.replace(
            self.instance,
            role=ROLE_OF.get(facts.role, self.instance.role),
            state=STATE_OF.get(facts.state, InstanceState.STARTING),
            incarnation=facts.incarnation,
            load=None if changed else self.instance.load,
            page_size=facts.page_size or self.instance.page_size,
            context_tokens=facts.context_tokens or None,
            bindings=frozenset(BINDING_OF[binding] for binding in facts.bindings if binding in BINDING_OF),
            flippable=facts.flippable,
        )
        return changed

    def learn_state(self, state: InstanceState, message: str = "") -> None:
        """Take over a state that comes without facts."""
        self.message = message
        if state is not self.instance.state:
            self.instance = dataclasses.replace(self.instance, state=state)

    def learn_load(self, report: engine_pb2.LoadReport, now: float) -> None:
        """Take over a report; fields that it leaves out stay as they were."""
        state, role = self.instance.state, self.instance.role
        self._load_values.update(load_values(report))
        if report.HasField("state"):
            state = STATE_OF.get(report.state, state)
        if report.HasField("role"):
            role = ROLE_OF.get(report.role, role)
        if report.HasField("message"):
            self.message = report.message
        age = max(0.0, report.age_seconds)
        if report.HasField("total_decode_tokens") and report.total_decode_tokens != self._decode_tokens:
            self._decode_tokens, self.stepped_at = report.total_decode_tokens, now - age
        # An engine that has not told anything yet has a state and no load, which is not a load of nothing.
        load = EngineLoad(age_seconds=age, **self._load_values) if self._load_values else None
        self.instance = dataclasses.replace(self.instance, state=state, role=role, load=load)
        if load is not None:
            self.taken_at = now - age
            self._report_until(self.taken_at)

    def forget_load(self) -> None:
        """The stream has ended: what the next one leaves out is unknown."""
        self._load_values.clear()

    def send(self, rid: str, tokens: int, now: float) -> None:
        """A request goes there."""
        self.finish(rid)
        sent = self._sent[rid] = _Sent(tokens, now)
        self._unreported.append(sent)
        self._unreported_tokens += tokens
        self._unreported_requests += 1

    def settle(self, rid: str) -> None:
        """A request's work is done there."""
        sent = self._sent.get(rid)
        if sent is not None:
            self._settle(sent)

    def finish(self, rid: str) -> bool:
        """A request has left; say whether it was there."""
        if rid not in self._sent:
            return False
        self.settle(rid)
        del self._sent[rid]
        return True

    def requests(self) -> list[str]:
        """Requests of this router that it has."""
        return list(self._sent)

    def age(self, now: float) -> float | None:
        """Age of its load."""
        return None if self.taken_at is None else now - self.taken_at

    def signs(self, now: float) -> Signs:
        """It, as seen by a request that it is silent about."""
        return Signs(self.instance.load, self.age(now), None if self.stepped_at is None else now - self.stepped_at)

    @property
    def share(self) -> Share:
        """What this router has there."""
        return Share(len(self._sent), self._unreported_requests, self._unreported_tokens)

    def prefill_candidate(
        self, now: float, match: PrefixMatch = NO_MATCH, others: Share = NO_SHARE
    ) -> PrefillCandidate:
        """It, as a choice of a prefill instance, with what other routers have there."""
        return PrefillCandidate(
            self.instance,
            self.age(now),
            match,
            self._unreported_tokens + others.unreported_tokens,
            len(self._sent) + others.in_flight,
        )

    def decode_candidate(self, now: float, others: Share = NO_SHARE) -> DecodeCandidate:
        """It, as a choice of a decode instance, with what other routers have there."""
        return DecodeCandidate(
            self.instance,
            self.age(now),
            self._unreported_requests + others.unreported_requests,
            self._unreported_tokens + others.unreported_tokens,
            len(self._sent) + others.in_flight,
        )

    def shown(self, now: float, cached_blocks: int, *, ejected_until: float | None) -> dict[str, Any]:
        """It, for people."""
        load = self.instance.load
        known = {k: v for k, v in dataclasses.asdict(load).items() if v is not None} if load is not None else None
        if known is not None:
            known["age_seconds"] = round(self.age(now) or 0.0, 3)
        return {
            "id": self.id,
            "role": self.instance.role.value,
            "state": self.instance.state.value,
            "message": self.problem or self.message,
            "connected": self.connected,
            "silent": self.silent,
            "ejected_seconds": None if ejected_until is None else round(ejected_until - now, 1),
            "agent": self.agent,
            "http_address": f"{self.endpoint.http_host}:{self.endpoint.http_port}" if self.endpoint else None,
            "incarnation": f"{self.instance.incarnation:016x}",
            "bindings": sorted(binding.value for binding in self.instance.bindings),
            "in_flight": self.in_flight,
            "cached_blocks": cached_blocks,
            "load": known,
        }

    def _settle(self, sent: _Sent) -> None:
        if not sent.reported:
            sent.reported = True
            self._unreported_tokens -= sent.tokens
            self._unreported_requests -= 1

    def _report_until(self, taken_at: float) -> None:
        """What was sent before that moment is in the engine's own numbers."""
        while self._unreported and (self._unreported[0].reported or self._unreported[0].at < taken_at):
            self._settle(self._unreported.popleft())


def new_record(instance_id: str, role: Role, agent: str) -> Record:
    """A record of an instance that has not told anything yet."""
    return Record(Instance(instance_id, role, InstanceState.STARTING), agent)


def _endpoint(facts: engine_pb2.Instance, role: Role) -> Endpoint | None:
    host, separator, port = facts.http_address.rpartition(":")
    if not separator or not port.isdigit():
        return None
    return Endpoint(
        instance_id=facts.instance_id,
        role=role,
        http_host=host.strip("[]"),
        http_port=int(port),
        bootstrap_host=facts.bootstrap_host,
        bootstrap_port=facts.bootstrap_port,
        incarnation=facts.incarnation,
    )
