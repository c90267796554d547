"""Joins what the substrate sees with what agents tell: the fleet for the planner, members for the reconciler. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kllm_core.fleet import EngineLoad, Fleet, Instance, InstanceState
from kllm_operator.fleet.told import Told
from kllm_operator.plan.members import Member
from kllm_operator.substrate.base import Observed

_HELD = (
    "running_requests",
    "queued_requests",
    "parked_requests",
    "transferring_requests",
    "retracted_requests",
)


@dataclass(frozen=True)
class Trust:
    """For how long what was told is believed.

    Attributes:
        stale_seconds: age above which a load is unknown.
        failed_seconds: an agent that holds its engine for hung ends it some seconds later, unless that resumes; one
            that has not done so by then has failed itself.
        lost_seconds: an instance that serves and whose agent was silent for so long has failed, unless its node hears
            it. Far above what a busy machine delays a report: a wrong guess costs a start.
    """

    stale_seconds: float = 10.0
    failed_seconds: float = 10.0
    lost_seconds: float = 20.0


@dataclass(frozen=True)
class Snapshot:
    """All instances at one moment, in both rooms' words.

    Attributes:
        observed: with failures that only agents know of.
    """

    observed: tuple[Observed, ...]
    fleet: Fleet
    members: tuple[Member, ...]


def snapshot(
    observed: Iterable[Observed],
    told: Mapping[str, Told],
    *,
    now: float,
    unflippable: frozenset[str] = frozenset(),
    unproven: frozenset[str] = frozenset(),
    trust: Trust | None = None,
) -> Snapshot:
    """Join both.

    Args:
        observed: of the substrate.
        told: of agents, by instance.
        now: seconds on the clock of `Told.heard_at`.
        unflippable: instances whose switch of role was refused or failed.
        unproven: instances that have not served for long enough for others to go because of them.
        trust: for how long what was told is believed.
    """
    believed = trust or Trust()
    seen = tuple(_with_failure(each, told.get(each.id), now, believed) for each in observed)
    instances = {each.id: _instance(each, told.get(each.id), now, each.id in unflippable) for each in seen}
    members = tuple(_member(each, instances[each.id], believed, each.id not in unproven) for each in seen)
    staying = {each.id: instances[each.id] for each in seen if not each.ending}
    return Snapshot(seen, Fleet(now, staying), members)


def _with_failure(seen: Observed, told: Told | None, now: float, trust: Trust) -> Observed:
    if told is None or seen.state not in {InstanceState.SERVING, InstanceState.DRAINING}:
        return seen
    if told.failed_at is not None and now - told.failed_at > trust.failed_seconds:
        return replace(seen, state=InstanceState.FAILED, message=told.failed)
    silent = now - told.heard_at
    if silent > trust.lost_seconds and not seen.vouched:
        return replace(seen, state=InstanceState.FAILED, message=f"its agent was silent for {silent:.0f} s")
    return seen


def _instance(seen: Observed, told: Told | None, now: float, unflippable: bool) -> Instance:
    # A slot on its way is no capacity on its way.
    state = InstanceState.SLOT if seen.slot and seen.state is InstanceState.STARTING else seen.state
    if told is None:
        # What drains to flip could flip when that was decided, and is not to be stopped before its agent was heard.
        flippable = seen.draining_to is not None and not unflippable and not seen.outdated
        return Instance(seen.id, seen.role, state, flippable=flippable)
    load = told.load
    if load is not None:
        load = replace(load, age_seconds=load.age_seconds + max(0.0, now - told.heard_at))
    return Instance(
        seen.id,
        seen.role,
        state,
        incarnation=told.incarnation,
        load=load,
        page_size=told.page_size,
        context_tokens=told.context_tokens,
        flippable=told.flippable and not unflippable and not seen.outdated,
    )


def _member(seen: Observed, instance: Instance, trust: Trust, proven: bool) -> Member:
    held = _held(instance.load, trust)
    if seen.state is InstanceState.DRAINING:
        # Only its agent knows that nothing is on its way to it any more; a load of nothing may be a moment too old.
        held = 0 if seen.drained else None if held is None else max(1, held)
    return Member(
        seen.id,
        seen.role,
        seen.state,
        flippable=instance.flippable,
        in_flight=held,
        age_seconds=seen.age_seconds,
        drain_overdue=seen.overdue,
        ending=seen.ending,
        slot=seen.slot,
        outdated=seen.outdated,
        requested=seen.requested,
        proven=proven,
    )


def _held(load: EngineLoad | None, trust: Trust) -> int | None:
    if load is None or load.age_seconds > trust.stale_seconds:
        return None
    told = [value for value in (getattr(load, name) for name in _HELD) if value is not None]
    return sum(told) if told else None
