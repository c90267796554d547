"""Status documents of a service and of its pools. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kllm_core.fleet import InstanceState
from kllm_core.kinds.status import (
    Condition,
    ConditionStatus,
    LoadStatus,
    PlanStatus,
    PoolStatus,
    RoleStatus,
    RouterStatus,
    ServiceStatus,
    StartPhase,
)
from kllm_core.labels import COMPONENT, COMPONENT_ENGINE, ROLE, SERVICE
from kllm_core.objectives import LoadSource, Role
from kllm_core.steps import DesiredCounts
from kllm_operator.loop.report import Report
from kllm_operator.plan.role_load import RoleLoad
from kllm_operator.service.conditions import State, pool_conditions, service_conditions
from kllm_operator.service.facts import Facts

_MOST_MESSAGE = 4096
_WARMING = frozenset({InstanceState.STARTING, InstanceState.GATED})
_LOAD_STEP = 0.01
"""Loads are told in steps of a hundredth: finer ones would be news at each tick."""


def service_status(facts: Facts, before: Mapping[str, Any], *, now: str) -> dict[str, Any]:
    """The status that a service shall have.

    Args:
        facts: what is known.
        before: the status that it has, which says since when conditions hold.
        now: RFC 3339 time.
    """
    report, service = facts.report, facts.service
    states = service_conditions(facts, _states(before))
    status = ServiceStatus(
        observed_generation=facts.generation,
        conditions=_conditions(states, before, generation=facts.generation, now=now),
        url=None if service is None else f"http://{service.name}.{service.metadata.namespace}.svc",
        revision="-".join(dict.fromkeys(facts.revisions.values())) or None,
        router=RouterStatus(desired=facts.routers.desired or 0, ready=facts.routers.ready),
    ).document()
    if report is None:
        return status | {key: before[key] for key in ("prefill", "decode", "plan", "advised") if key in before}
    return status | _told(report, facts, before)


def pool_status(
    facts: Facts,
    role: Role,
    before: Mapping[str, Any],
    *,
    generation: int,
    now: str,
    states: Callable[[Facts, Role, Mapping[str, State]], tuple[State, ...]] = pool_conditions,
) -> dict[str, Any]:
    """The status that a pool shall have.

    Args:
        facts: of the service.
        role: of the pool.
        before: the status that it has.
        generation: of the pool's own spec.
        now: RFC 3339 time.
        states: its conditions.
    """
    report, service = facts.report, facts.service
    conditions = _conditions(states(facts, role, _states(before)), before, generation=generation, now=now)
    if report is None and before:
        return {**before, "conditions": [each.document() for each in conditions], "observedGeneration": generation}
    there = [each for each in facts.instances(role) if each.state is not InstanceState.FAILED]
    selected = None if service is None else f"{COMPONENT}={COMPONENT_ENGINE},{ROLE}={role},{SERVICE}={service.name}"
    return PoolStatus(
        **_role_values(facts, role, before),
        observed_generation=generation,
        conditions=conditions,
        replicas=len(there),
        selector=selected,
        revision=facts.revisions.get(role) or None,
        advised=None if report is None or report.advised is None else report.advised.of(role),
    ).document()


def is_told(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a status says all that is wanted and nothing more, but for conditions of others."""
    return _own(live, wanted) == dict(wanted)


def is_urgent(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether what differs is more than numbers of load and words, which may wait for each other."""
    return bool(_gist(wanted) != _gist(_own(live, wanted)))


def forgets_load(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a load that was told is unknown: of a service, that of one role or of both."""
    roles = [(wanted, live), *((wanted.get(role) or {}, live.get(role) or {}) for role in Role)]
    return any(_knows_load(before) and not _knows_load(after) for after, before in roles)


def _knows_load(told: Mapping[str, Any]) -> bool:
    return bool((told.get("load") or {}).get("source", LoadSource.UNKNOWN) != LoadSource.UNKNOWN)


def _told(report: Report, facts: Facts, before: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a service's status that follows from what its loop saw and decided."""
    roles = {role: _role_values(facts, role, before.get(role.value) or {}) for role in Role}
    status = {role.value: RoleStatus(**values).document() for role, values in roles.items()}
    status["plan"] = _plan(report.advised or report.desired).document()
    if report.advised is not None:
        status["advised"] = _plan(report.advised).document()
    return status


def _states(status: Mapping[str, Any]) -> dict[str, State]:
    return {
        each["type"]: State(each["type"], ConditionStatus(each["status"]), each["reason"], each["message"])
        for each in status.get("conditions") or ()
    }


def _own(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    types = {each["type"] for each in wanted.get("conditions", ())}
    held = {each["type"]: each for each in live.get("conditions") or ()}
    # In our order: the server keeps the order in which they were first told.
    ordered = [held[each["type"]] for each in wanted.get("conditions", ()) if each["type"] in held]
    return {**live, "conditions": ordered} if types else dict(live)


def _gist(status: Any) -> Any:
    if isinstance(status, Mapping):
        told = {key: _gist(value) for key, value in status.items() if key not in {"load", "message", "startPhases"}}
        # Of what the planner said the counts; its reason follows loads.
        plans = {key: {**told[key], "reason": ""} for key in ("plan", "advised") if isinstance(told.get(key), dict)}
        return told | plans
    return [_gist(each) for each in status] if isinstance(status, list) else status


def _conditions(
    states: Iterable[State], before: Mapping[str, Any], *, generation: int, now: str
) -> tuple[Condition, ...]:
    held = {each["type"]: each for each in before.get("conditions") or ()}
    return tuple(
        Condition(
            type=state.type,
            status=state.status,
            observed_generation=generation,
            last_transition_time=(
                held[state.type]["lastTransitionTime"]
                if held.get(state.type, {}).get("status") == state.status
                else now
            ),
            reason=state.reason,
            message=_short(state.message),
        )
        for state in states
    )


def _role_values(facts: Facts, role: Role, before: Mapping[str, Any]) -> dict[str, Any]:
    instances, slots = facts.instances(role), facts.slots(role)
    states = [each.state for each in instances]
    ready_slots = sum(each.state is InstanceState.SLOT for each in slots)
    values: dict[str, Any] = {
        "desired": facts.desired(role),
        "ready": facts.serving(role),
        "warming": sum(state in _WARMING for state in states),
        "draining": states.count(InstanceState.DRAINING),
        "failed": states.count(InstanceState.FAILED),
        "outdated": sum(each.outdated for each in instances),
        "slots": ready_slots,
        "slots_warming": sum(each.state in _WARMING for each in slots),
    }
    if facts.report is None:
        return values
    return values | {"load": _load(facts.report, role)} | _start(facts.report, role, before)


def _start(report: Report, role: Role, before: Mapping[str, Any]) -> dict[str, Any]:
    last = report.pools[role].last_start
    known = before.get("startPhases") or []
    phases = () if last is None else last.phases
    told = tuple(StartPhase(name=each.name, milliseconds=_milli(each.seconds)) for each in phases)
    if last is not None and last.seconds is not None and (last.source is not None or not known):
        return {"start_milliseconds": _milli(last.seconds), "start_phases": told}
    # The leader that decided that start knows best what it took.
    return {
        "start_milliseconds": before.get("startMilliseconds"),
        "start_phases": tuple(StartPhase.model_validate(each) for each in known),
    }


def _load(report: Report, role: Role) -> LoadStatus:
    load: RoleLoad = report.loads[0] if role is Role.PREFILL else report.loads[1]
    return LoadStatus(
        value_milli=_stepped(load.load.value),
        predicted_milli=_stepped(load.load.predicted),
        measured_milli=_stepped(load.load.measured),
        source=load.load.source,
        term=None if load.term is None else load.term.value,
    )


def _plan(counts: DesiredCounts) -> PlanStatus:
    return PlanStatus(
        prefill=counts.prefill, decode=counts.decode, reason=counts.reason, message=_short(counts.message)
    )


def _stepped(load: float | None) -> int | None:
    return None if load is None else _milli(round(load / _LOAD_STEP) * _LOAD_STEP)


def _milli(value: float) -> int:
    return max(0, round(value * 1000))


def _short(text: str) -> str:
    return text if len(text) <= _MOST_MESSAGE else f"{text[: _MOST_MESSAGE - 3]}..."
