"""Conditions of a service and of its pools. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kllm_core.conditions import ConditionType, Reason
from kllm_core.fleet import InstanceState
from kllm_core.kinds.base import Scaling
from kllm_core.kinds.status import ConditionStatus
from kllm_core.objectives import Binding, Role
from kllm_operator.loop.crashes import LastFailure, Pause
from kllm_operator.service.facts import Facts
from kllm_operator.substrate.base import Observed

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN

_OF_MODEL = frozenset({
    Reason.MODEL_NOT_FOUND, Reason.MODEL_ACCESS_DENIED, Reason.MODEL_UNUSABLE, Reason.HUB_UNREACHABLE,
    Reason.CLAIM_NOT_FOUND, Reason.CLAIM_NOT_BOUND, Reason.FOLDER_NOT_FOUND, Reason.DISK_FULL,
})  # fmt: skip
_HAVE_MODEL = frozenset({
    InstanceState.SERVING, InstanceState.DRAINING, InstanceState.SLOT, InstanceState.GATED,
})  # fmt: skip
_ON_ITS_WAY = frozenset({Reason.STARTING, Reason.FETCHING})
_READY_OF = {Role.PREFILL: ConditionType.PREFILL_READY, Role.DECODE: ConditionType.DECODE_READY}
_OF_LOOP = frozenset({
    ConditionType.MODEL_AVAILABLE, ConditionType.PREFILL_READY, ConditionType.DECODE_READY, ConditionType.PROGRESSING,
    ConditionType.SCALING_LIMITED, ConditionType.DEGRADED,
})  # fmt: skip
_GATES = (
    ConditionType.ACCEPTED, ConditionType.MODEL_AVAILABLE, ConditionType.PREFILL_READY, ConditionType.DECODE_READY,
    ConditionType.ROUTER_READY,
)  # fmt: skip


@dataclass(frozen=True)
class State:
    """A condition without its times."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def service_conditions(facts: Facts, before: Mapping[str, State]) -> tuple[State, ...]:
    """All conditions of a service; Ready comes first and sums up the others.

    Args:
        facts: what is known.
        before: what was said before, by type. It stands for what a loop has to tell that has not looked yet: the
            leader before this one has.
    """
    others = (
        accepted(facts), _model(facts), *(_role(facts, role) for role in Role), _router(facts), progressing(facts),
        _limited(facts), _binding(facts), _degraded(facts), paused(facts),
    )  # fmt: skip
    if facts.report is None and facts.trouble is None:
        others = tuple(before.get(each.type, each) if each.type in _OF_LOOP else each for each in others)
    return (_ready(others), *others)


def pool_conditions(facts: Facts, role: Role, before: Mapping[str, State]) -> tuple[State, ...]:
    """Conditions of one pool. See `service_conditions`."""
    found = _role(facts, role)
    told: tuple[State, ...] = (
        State(ConditionType.READY, found.status, found.reason, found.message),
        _rollout(facts, role),
    )
    if facts.report is None:
        told = tuple(before.get(each.type, each) for each in told)
    return (*told, accepted(facts), paused(facts))


def standalone_conditions(facts: Facts, role: Role, before: Mapping[str, State]) -> tuple[State, ...]:
    """Conditions of a pool without a service; Ready comes first and sums up the others. See `service_conditions`."""
    found = _role(facts, role)
    ready = State(ConditionType.READY, found.status, found.reason, found.message)
    others: tuple[State, ...] = (
        accepted(facts),
        _progress(facts, role),
        _limited(facts),
        _degraded(facts),
        paused(facts),
    )
    if facts.report is None and facts.trouble is None:
        ready = before.get(ready.type, ready)
        others = tuple(before.get(each.type, each) if each.type in _OF_LOOP else each for each in others)
    if ready.status is not TRUE:
        # Without instances the verdict, or what could not be made, says more than that there are none.
        if facts.trouble is not None:
            ready = State(ready.type, FALSE, facts.trouble.reason, facts.trouble.message)
        elif not facts.verdict.accepted:
            ready = State(ready.type, FALSE, facts.verdict.reason, facts.verdict.message)
    return (ready, *others)


def accepted(facts: Facts) -> State:
    """Whether the spec can be carried out."""
    verdict = facts.verdict
    message = verdict.message
    if not verdict.accepted and facts.report is not None:
        message = f"{message}; the last accepted spec goes on"
    return State(ConditionType.ACCEPTED, TRUE if verdict.accepted else FALSE, verdict.reason, message)


def progressing(facts: Facts) -> State:
    """Whether the fleet is on its way to what is wanted."""
    kind, report = ConditionType.PROGRESSING, facts.report
    if report is None:
        if not facts.verdict.accepted or facts.paused:
            return State(kind, FALSE, Reason.SETTLED)
        return State(kind, TRUE, Reason.STARTING, "it is set up")
    stopped = [f"{role}: {told}" for role in Role if (told := report.pools[role].stopped)]
    if stopped:
        return State(kind, FALSE, Reason.ROLLOUT_STOPPED, "; ".join(stopped))
    every = [each for role in Role for each in (*facts.instances(role), *facts.slots(role))]
    if any(each.outdated for each in every):
        old = sum(each.outdated for each in every)
        return State(kind, TRUE, Reason.ROLLING_OUT, f"{old} of {len(every)} are of an older revision")
    moving = [role for role in Role if facts.serving(role) != facts.desired(role) or _moves(facts, role)]
    if not moving:
        return State(kind, FALSE, Reason.SETTLED, report.idle.message)
    counts = ", ".join(f"{role} {facts.serving(role)} of {facts.desired(role)}" for role in Role)
    return State(kind, TRUE, Reason.SCALING, f"serving: {counts}; {report.idle.message}".rstrip("; "))


def _rollout(facts: Facts, role: Role) -> State:
    """Whether instances of a role are being replaced. A new leader reads from it that this was given up."""
    kind = ConditionType.PROGRESSING
    stopped = None if facts.report is None else facts.report.pools[role].stopped
    if stopped:
        return State(kind, FALSE, Reason.ROLLOUT_STOPPED, stopped)
    every = (*facts.instances(role), *facts.slots(role))
    if any(each.outdated for each in every):
        return State(kind, TRUE, Reason.ROLLING_OUT)
    return State(kind, FALSE, Reason.SETTLED)


def _progress(facts: Facts, role: Role) -> State:
    """Whether the instances of one role are on their way to what is wanted."""
    told = progressing(facts) if facts.report is None else _rollout(facts, role)
    serving, wanted = facts.serving(role), facts.desired(role)
    if facts.report is None or told.reason != Reason.SETTLED or (serving == wanted and not _moves(facts, role)):
        return told
    return State(told.type, TRUE, Reason.SCALING, f"{serving} of {wanted} serve")


def paused(facts: Facts) -> State:
    """Whether nothing is done."""
    if facts.paused:
        return State(ConditionType.PAUSED, TRUE, Reason.PAUSED_BY_ANNOTATION, "nothing is changed until it is removed")
    return State(ConditionType.PAUSED, FALSE, Reason.NOT_PAUSED)


def _ready(others: tuple[State, ...]) -> State:
    true = {state.type: state for state in others if state.status is TRUE}
    asleep = [kind for kind in _READY_OF.values() if kind in true and true[kind].reason == Reason.SCALED_TO_ZERO]
    missing = [state for state in others if state.type in _GATES and state.type not in true]
    if true.keys() >= set(_READY_OF.values()):
        # Whoever serves has a model: what a revision lacks that is on its way keeps nobody from being served. At zero
        # nobody needs one yet, unless it is known that there is none.
        missing = [
            state
            for state in missing
            if state.type != ConditionType.MODEL_AVAILABLE or (asleep and state.status is not UNKNOWN)
        ]
    if not missing and asleep:
        return State(
            ConditionType.READY, TRUE, Reason.SCALED_TO_ZERO, "nobody came for long; a request starts instances"
        )
    if not missing:
        return State(ConditionType.READY, TRUE, Reason.SERVING, "requests are served")
    # What is wrong says more than what is on its way, and what is known more than what is not.
    worst = min(missing, key=lambda state: (state.reason in _ON_ITS_WAY, state.status is UNKNOWN))
    message = f"{worst.type}: {worst.message}" if worst.message else str(worst.type)
    return State(ConditionType.READY, FALSE, worst.reason, message)


def _model(facts: Facts) -> State:
    kind = ConditionType.MODEL_AVAILABLE
    every = [each for role in Role for each in (*facts.instances(role), *facts.slots(role))]
    current = [each for each in every if not each.outdated]
    failed = next((each for each in current if each.reason in _OF_MODEL), None)
    if failed is not None:
        return State(kind, FALSE, failed.reason, f"{failed.id}: {failed.message}")
    if any(each.state in _HAVE_MODEL for each in current):
        return State(kind, TRUE, Reason.AVAILABLE)
    before = next((last for role in Role if (last := _last(facts, role)) and last.reason in _OF_MODEL), None)
    if before is not None:
        return State(kind, FALSE, before.reason, f"{before.message}; it is tried again")
    if any(each.state in _HAVE_MODEL for each in every):
        return State(kind, TRUE, Reason.AVAILABLE, "to instances of an older revision")
    return State(kind, UNKNOWN, Reason.FETCHING, "no instance has it yet")


def _role(facts: Facts, role: Role) -> State:
    kind, ready = _READY_OF[role], facts.serving(role)
    least = 1 if facts.service is None else max(1, facts.service.spec.role(role).min_replicas)
    if ready >= least:
        return State(kind, TRUE, Reason.MINIMUM_READY, f"{ready} serve")
    if facts.report is not None and not facts.desired(role) and not ready:
        return State(kind, TRUE if _wakes(facts) else FALSE, Reason.SCALED_TO_ZERO, "no instance is wanted")
    reason, why = next(_problems(facts, role), (Reason.STARTING, ""))
    counts = f"{ready} of {least} serve"
    return State(kind, FALSE, reason, f"{counts}; {why}" if why else counts)


def _wakes(facts: Facts) -> bool:
    """Whether the planner itself starts instances when somebody comes."""
    return facts.service is not None and facts.service.spec.scaling is Scaling.SLO and not facts.paused


def _problems(facts: Facts, role: Role) -> Iterator[tuple[str, str]]:
    """What keeps a role from serving, the worst first."""
    pool = None if facts.report is None else facts.report.pools[role]
    if pool is not None and pool.trouble:
        yield Reason.INSTANCE_FAILING, pool.trouble
    instances = sorted(facts.instances(role), key=lambda each: (not _has_failed(each), each.age_seconds))
    for each in instances:
        if each.reason:
            yield each.reason, f"{each.id}: {each.message}"
    for each in instances:
        if _has_failed(each):
            yield Reason.INSTANCE_FAILING, f"{each.id}: {each.message}"
    # What is tried once more after it has failed is not simply on its way.
    last = _last(facts, role)
    reason = Reason.INSTANCE_FAILING if last is None else last.reason or Reason.INSTANCE_FAILING
    if pool is not None and pool.held_back is not None:
        yield reason, _held_words(pool.held_back)
    if last is not None:
        yield reason, f"{last.message}; it is tried again"
    for each in instances:
        if each.state is InstanceState.STARTING:
            yield Reason.STARTING, f"{each.id}: {each.message}"


def _router(facts: Facts) -> State:
    kind, routers = ConditionType.ROUTER_READY, facts.routers
    if routers.desired is None:
        return State(kind, UNKNOWN, Reason.STARTING, "its Deployment is not there yet")
    counts = f"{routers.ready} of {routers.desired} ready"
    if not routers.ready:
        return State(kind, FALSE, routers.reason, f"{counts}; {routers.message}" if routers.message else counts)
    if routers.knows_fleet is False and any(facts.desired(role) for role in Role):
        return State(kind, FALSE, Reason.STARTING, f"{counts}; they have not found a prefill and a decode instance yet")
    return State(kind, TRUE, Reason.AVAILABLE, counts)


def _limited(facts: Facts) -> State:
    kind = ConditionType.SCALING_LIMITED
    limited = None if facts.report is None else facts.report.limited
    if limited is None:
        every = (each for role in Role for each in (*facts.instances(role), *facts.slots(role)))
        homeless = next((each for each in every if each.reason == Reason.UNSCHEDULABLE), None)
        if homeless is not None:
            return State(kind, TRUE, Reason.UNSCHEDULABLE, f"{homeless.id}: {homeless.message}")
        return State(kind, FALSE, Reason.WITHIN_LIMITS)
    # What others ask for is a matter of bounds, whichever bound it is.
    reason = Reason.OUT_OF_BOUNDS if limited.reason == "ScalingLimited" else limited.reason
    return State(kind, TRUE, reason, limited.message)


def _binding(facts: Facts) -> State:
    kind, service = ConditionType.BINDING_DEGRADED, facts.service
    if service is not None and service.spec.router.binding is not Binding.EARLY:
        stages = service.spec.prefill.parallelism.pipeline
        if stages > 1:
            return State(
                kind, TRUE, Reason.LATE_UNAVAILABLE,
                f"prefill.parallelism.pipeline is {stages}: such an engine cannot prefill before its decode instance "
                "is known, so that requests are bound early",
            )  # fmt: skip
    return State(kind, FALSE, Reason.AS_CONFIGURED)


def _degraded(facts: Facts) -> State:
    kind, report = ConditionType.DEGRADED, facts.report
    if facts.trouble is not None:
        return State(kind, TRUE, facts.trouble.reason, facts.trouble.message)
    if report is None:
        return State(kind, FALSE, Reason.AS_EXPECTED)
    for role in Role:
        failed = [f"{each.id}: {each.message}" for each in facts.instances(role) if _has_failed(each)]
        pool = report.pools[role]
        held = [] if pool.held_back is None else [_held_words(pool.held_back)]
        last = (
            [] if pool.last_failure is None else [f"the last one that was started failed: {pool.last_failure.message}"]
        )
        said = [*failed, *([pool.trouble] if pool.trouble else []), *held, *last]
        if said:
            return State(kind, TRUE, Reason.INSTANCE_FAILING, said[0])
    missing = sum(max(0, report.pools[role].slots_wanted - len(facts.slots(role))) for role in Role)
    if missing:
        return State(kind, TRUE, Reason.SLOTS_MISSING, f"{missing} of the slots that are to be kept are not there")
    if facts.routers.unshared:
        apart = f"each router counts its own requests only: {facts.routers.unshared}"
        return State(kind, TRUE, Reason.ROUTERS_APART, apart)
    return State(kind, FALSE, Reason.AS_EXPECTED)


def _last(facts: Facts, role: Role) -> LastFailure | None:
    return None if facts.report is None else facts.report.pools[role].last_failure


def _held_words(held: Pause) -> str:
    return f"{held.message}; it {held.words}" if held.message else held.words


def _has_failed(instance: Observed) -> bool:
    return instance.state is InstanceState.FAILED


def _moves(facts: Facts, role: Role) -> bool:
    moving = {InstanceState.STARTING, InstanceState.DRAINING, InstanceState.FAILED}
    return any(each.state in moving for each in facts.instances(role))
