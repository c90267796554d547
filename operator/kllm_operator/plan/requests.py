"""What people ask of single instances. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kllm_core.fleet import InstanceState
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts, Request
from kllm_operator.plan.members import Limits, Member

_SERVED = (InstanceState.SERVING, InstanceState.DRAINING)


@dataclass(frozen=True)
class Flips:
    """Counts after the flip that a person asks for, and why others are not done.

    Attributes:
        flip_to: the role that gets an instance of the other one.
        granted: the instance whose flip is in `desired`; None if there is none.
        refused: why an instance will not flip, by its id.
        waiting: why an instance does not flip yet, by its id.
    """

    desired: DesiredCounts
    flip_to: Role | None
    granted: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)


def asked_flips(
    desired: DesiredCounts, flip_to: Role | None, members: Iterable[Member], limits: Limits, *, external: bool
) -> Flips:
    """Shift both counts by the flip that a person asks for, one at a time.

    Args:
        desired: as it is without.
        flip_to: the role of a flip that is decided already.
        members: all instances; those that ask for nothing count only.
        limits: of the service.
        external: whether others write the counts, so that nothing may be shifted.
    """
    there = [each for each in members if not each.ending and not each.is_idle]
    granted, counts, refused, waiting = None, {role: desired.of(role) for role in Role}, {}, {}
    for member in sorted(there, key=lambda each: each.id):
        if member.requested is not Request.FLIP:
            continue
        to, coming = member.role.other, _coming(member.role.other, there)
        # With an instance missing there, either the counts were shifted already, or it starts and this waits for it.
        shifted = counts if coming < counts[to] else {member.role: counts[member.role] - 1, to: counts[to] + 1}
        why = "scaling is External, so counts are others' to change" if external else None
        why = why or _unable(member, limits) or _out_of_bounds(shifted, limits)
        if why is not None:
            refused[member.id] = why
        elif granted is not None or flip_to not in {None, to}:
            waiting[member.id] = "another instance flips"
        elif coming > counts[to]:
            waiting[member.id] = f"{to} has {coming} instances and wants {counts[to]}"
        else:
            granted, counts, flip_to = member.id, shifted, to
    if granted is not None:
        says = f"{granted} is asked to become {flip_to}; {desired.message}"
        desired = DesiredCounts(counts[Role.PREFILL], counts[Role.DECODE], "FlipRequested", says)
    return Flips(desired, flip_to, granted, refused, waiting)


def _coming(role: Role, there: Iterable[Member]) -> int:
    states = (InstanceState.SERVING, InstanceState.STARTING)
    return sum(each.role is role and each.state in states for each in there)


def _unable(member: Member, limits: Limits) -> str | None:
    if member.state not in _SERVED:
        return f"it is {member.state}; only what serves can flip"
    if member.outdated:
        return "it is of an old revision and will be replaced"
    if not limits.alike:
        return "instances of prefill and decode differ in their accelerators or pod templates"
    return None if member.flippable else "its engine cannot switch roles"


def _out_of_bounds(counts: Mapping[Role, int], limits: Limits) -> str | None:
    for role in Role:
        pool = limits.of(role)
        least = max(pool.min_replicas, min(1, pool.max_replicas))
        if counts[role] < least:
            return f"{role} would have {counts[role]} instances, and needs {least}"
        if counts[role] > pool.max_replicas:
            return f"{role} would have {counts[role]} instances, and maxReplicas is {pool.max_replicas}"
    return None
