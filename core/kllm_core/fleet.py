"""All instances of one InferenceService as one immutable snapshot. Pure.

Decisions read snapshots and nothing else; what a neighbour has not told is None, never a guess.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from kllm_core.objectives import Binding, Role


class InstanceState(enum.StrEnum):
    """States of a slot, in the order in which it passes through them; Failed can follow each."""

    SLOT = "Slot"
    GATED = "Gated"
    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"
    FAILED = "Failed"


@dataclass(frozen=True)
class EngineLoad:
    """What one engine said of itself. Tokens, requests, seconds; None is unknown.

    Attributes:
        age_seconds: age of these numbers in the snapshot.
        queued_requests: not yet running: waiting, bootstrapping, or waiting for KV room.
        queued_uncached_tokens: prompt tokens of queued requests that must be computed.
        parked_requests: prefilled and waiting for a decode instance.
        parked_limit_tokens: above it the engine prefills nothing new without a bound decode instance.
        kv_used_tokens: held by requests; evictable cache is not in it.
        kv_high_water_tokens: a decode instance above it gets nothing new.
        decode_step_seconds: mean of the last decode steps.
        prefill_tokens_per_second: sliding, over busy time.
        accept_length: tokens per sequence and decode step, mean; unknown without speculative decoding.
    """

    age_seconds: float
    running_requests: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None
    queued_uncached_tokens: int | None = None
    parked_requests: int | None = None
    parked_tokens: int | None = None
    parked_limit_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_evictable_tokens: int | None = None
    kv_total_tokens: int | None = None
    kv_high_water_tokens: int | None = None
    transferring_requests: int | None = None
    retracted_requests: int | None = None
    prefill_step_seconds: float | None = None
    decode_step_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    max_running_requests: int | None = None
    accept_length: float | None = None


@dataclass(frozen=True)
class Instance:
    """One engine with a role: one pod, or a group of pods with a leader.

    Attributes:
        id: unique in the fleet and stable over role switches.
        incarnation: new for every server process; caches of another incarnation are gone.
        load: None until the engine has told anything.
        pods: names of its pods, leader first.
    """

    id: str
    role: Role
    state: InstanceState
    incarnation: int = 0
    load: EngineLoad | None = None
    page_size: int = 16
    context_tokens: int | None = None
    bindings: frozenset[Binding] = frozenset({Binding.LATE, Binding.EARLY})
    flippable: bool = False
    pods: tuple[str, ...] = ()

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state is InstanceState.SERVING


@dataclass(frozen=True)
class Fleet:
    """Instances by id, at one moment.

    Attributes:
        taken_at: seconds on the owner's monotonic clock.
    """

    taken_at: float
    instances: dict[str, Instance] = field(default_factory=dict)

    def of(self, role: Role) -> Iterator[Instance]:
        """Instances of one role, whatever their state."""
        return (instance for instance in self.instances.values() if instance.role is role)

    def serving(self, role: Role) -> list[Instance]:
        """Instances of one role that take new requests, in the order of their ids."""
        return sorted((i for i in self.of(role) if i.takes_requests), key=lambda i: i.id)
