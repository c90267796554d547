"""What the planner must remember from one decision to the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_core.objectives import Role

_REMEMBERED = 64
"""Past rates that are kept, whatever the time that they cover."""


@dataclass(frozen=True)
class Past:
    """The rate at some moment."""

    at: float
    requests_per_second: float


@dataclass(frozen=True)
class PlannerState:
    """What the planner must remember from one decision to the next.

    Attributes:
        prefill: the count last decided; None before the first decision.
        prefill_low: lower counts that would do, each with the time since when.
        flip_to: the role that is being given an instance of the other one.
        prefill_short: since when it has been short; None: it is not.
        prefill_grown: when the role last grew, and from which count; None: not within memory.
        idle_since: since when there is nothing to do; None when there is.
        past: rates in the order of their times.
    """

    prefill: int | None = None
    decode: int | None = None
    prefill_low: tuple[tuple[int, float], ...] = ()
    decode_low: tuple[tuple[int, float], ...] = ()
    flip_to: Role | None = None
    prefill_grown: tuple[float, int] | None = None
    decode_grown: tuple[float, int] | None = None
    idle_since: float | None = None
    past: tuple[Past, ...] = ()
    prefill_short: float | None = None
    decode_short: float | None = None

    def count(self, role: Role) -> int | None:
        """The count last decided."""
        return self.prefill if role is Role.PREFILL else self.decode

    def short(self, role: Role) -> float | None:
        """Since when the role has been short."""
        return self.prefill_short if role is Role.PREFILL else self.decode_short

    def grown(self, role: Role) -> tuple[float, int] | None:
        """When the role last grew, and from which count."""
        return self.prefill_grown if role is Role.PREFILL else self.decode_grown

    def low(self, role: Role) -> dict[int, float]:
        """Since when lower counts would do."""
        return dict(self.prefill_low if role is Role.PREFILL else self.decode_low)


def remembered(past: tuple[Past, ...], now: float, rate: float | None, *, seconds: float) -> tuple[Past, ...]:
    """The past with the present rate, back to the last one that is older than `seconds`."""
    kept = tuple(each for each in past if each.at <= now)
    old = [index for index, each in enumerate(kept) if each.at <= now - seconds]
    kept = kept[old[-1] :] if old else kept
    if rate is None or (kept and now - kept[-1].at < seconds / (_REMEMBERED - 2)):
        return kept
    return (*kept, Past(now, rate))[-_REMEMBERED:]
