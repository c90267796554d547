"""The engine's load as the contract tells it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role
from kllm_core.wire import ROLES, STATES
from kllm_engine.agent.instance import Instance
from kllm_engine.messages import Load

_ALWAYS = (
    "running_requests",
    "queued_requests",
    "queued_tokens",
    "queued_uncached_tokens",
    "parked_requests",
    "parked_tokens",
    "kv_used_tokens",
    "kv_evictable_tokens",
    "kv_total_tokens",
    "transferring_requests",
    "retracted_requests",
    "max_running_requests",
    "total_prefill_tokens",
    "total_decode_tokens",
    "total_prefill_busy_seconds",
)
_UNKNOWN_WHEN_ZERO = (
    "parked_limit_tokens",
    "prefill_step_seconds",
    "decode_step_seconds",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "accept_length",
)
OPTIONAL_FIELDS = ("role", "state", "message", *_ALWAYS, *_UNKNOWN_WHEN_ZERO)


_LIVING_AGE_SECONDS = 2.0
"""Numbers are told between two steps. In a long step they look no older than this while the engine gives signs of life,
or it would be taken for one that hangs."""


class LoadBook:
    """The newest load of the engine.

    Args:
        clock: seconds; the same clock as the sender's `now`, which is the machine's monotonic one.

    Attributes:
        latest: None until the engine has told anything.
        alive_at: its last sign of life.
    """

    def __init__(self, instance: Instance, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._instance = instance
        self._clock = clock
        self.latest: Load | None = None
        self.alive_at = 0.0

    @property
    def told_at(self) -> float:
        """When the newest load was true; 0 before the first."""
        return 0.0 if self.latest is None else self.latest.now

    def update(self, load: Load) -> None:
        """Take a newer load."""
        before = self.latest
        self.latest = load
        self.alive(load.now)
        if before is None or before.parked_requests != load.parked_requests:
            self._instance.changes.notify()

    def clear(self, role: Role) -> None:
        """Forget what was told in another role than this new one, of which the engine may have told already."""
        if self.latest is not None and self.latest.role != role.value:
            self.latest = None

    def alive(self, at: float) -> None:
        """The engine gave a sign of life."""
        self.alive_at = max(self.alive_at, at)

    def report(self, sequence: int) -> engine_pb2.LoadReport:
        """All that is known now."""
        report = engine_pb2.LoadReport(
            sequence=sequence,
            incarnation=self._instance.incarnation,
            role=None if self._instance.role is None else ROLES[self._instance.role],
            state=STATES[self._instance.state],
            # What follows the first line is the end of a log.
            message=self._instance.message.partition("\n")[0],
        )
        load = self.latest
        if load is not None:
            report.age_seconds = self._age(load)
            for name in _ALWAYS:
                setattr(report, name, getattr(load, name))
            for name in _UNKNOWN_WHEN_ZERO:
                value = getattr(load, name)
                if value:
                    setattr(report, name, value)
        return report

    def _age(self, load: Load) -> float:
        now = self._clock()
        return max(0.0, min(now - load.now, max(_LIVING_AGE_SECONDS, now - self.alive_at)))

    def pace_words(self) -> str:
        """How well the engine keeps its pace, for people; empty before the first paced step."""
        load = self.latest
        if load is None or not load.paced_steps:
            return ""
        return f"{load.late_steps} of {load.paced_steps} steps late, by {load.late_seconds:.3f} s in all"

    def remaining_requests(self) -> int | None:
        """Requests that the engine has not finished; None when it has not said yet."""
        load = self.latest
        if load is None:
            return None
        return (
            load.running_requests
            + load.queued_requests
            + load.parked_requests
            + load.transferring_requests
            + load.retracted_requests
        )


def delta(before: engine_pb2.LoadReport, now: engine_pb2.LoadReport) -> engine_pb2.LoadReport:
    """`now` without the optional fields that are as in `before`."""
    smaller = engine_pb2.LoadReport()
    smaller.CopyFrom(now)
    for name in OPTIONAL_FIELDS:
        if now.HasField(name) and before.HasField(name) and getattr(now, name) == getattr(before, name):
            smaller.ClearField(name)
    return smaller
