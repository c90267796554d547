"""`kubectl kllm explain`: why a service has the instances that it has."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from kllm.kubectl.cells import age, milli, seconds
from kllm.kubectl.events import Event, find_events
from kllm.kubectl.kubectl import Kubectl
from kllm.kubectl.services import Instance, Service, find_instances, find_services
from kllm_core.conditions import ConditionType
from kllm_core.kinds.base import Scaling
from kllm_core.kinds.status import Condition, ConditionStatus
from kllm_core.objectives import Role

_MOST_EVENTS = 15
_GOOD = {
    ConditionType.READY: ConditionStatus.TRUE,
    ConditionType.ACCEPTED: ConditionStatus.TRUE,
    ConditionType.MODEL_AVAILABLE: ConditionStatus.TRUE,
    ConditionType.PREFILL_READY: ConditionStatus.TRUE,
    ConditionType.DECODE_READY: ConditionStatus.TRUE,
    ConditionType.ROUTER_READY: ConditionStatus.TRUE,
    ConditionType.PROGRESSING: ConditionStatus.FALSE,
    ConditionType.SCALING_LIMITED: ConditionStatus.FALSE,
    ConditionType.BINDING_DEGRADED: ConditionStatus.FALSE,
    ConditionType.DEGRADED: ConditionStatus.FALSE,
    ConditionType.PAUSED: ConditionStatus.FALSE,
}
"""How each condition stands when there is nothing to tell."""


def run(kubectl: Kubectl, name: str) -> int:
    """Print it; returns 0.

    Raises:
        PluginError: the service cannot be had.
    """
    service = find_services(kubectl, name)[0]
    inside = kubectl.inside(service.namespace)
    instances = find_instances(inside, service, {})
    names = {service.name, *(f"{service.name}-{role}" for role in Role)}
    events = find_events(inside, names, {each.name for each in instances})
    for line in explained(service, instances, events, dt.datetime.now(dt.UTC)):
        print(line)
    return 0


def explained(service: Service, instances: list[Instance], events: list[Event], now: dt.datetime) -> Iterator[str]:
    """Lines for people."""
    yield from _heading(service)
    yield ""
    yield "Counts"
    yield from _counts(service)
    for role in Role:
        yield from _pool(service, role)
    notable = [each for each in service.status.conditions if _is_notable(each)]
    if notable:
        yield ""
        yield "Conditions"
        for each in notable:
            yield f"  {each.type} is {each.status} ({each.reason}){_tail(each.message)}"
    waiting = [each for each in instances if each.requested or each.message]
    if waiting:
        yield ""
        yield "Instances"
        for instance in waiting:
            asked = f", {instance.requested} was asked for" if instance.requested else ""
            yield f"  {instance.name} ({instance.role}) {instance.state}{asked}{_tail(instance.message)}"
    yield ""
    yield "Events" if events else "Events: none"
    for event in events[-_MOST_EVENTS:]:
        times = f" ({event.count} times)" if event.count > 1 else ""
        yield f"  {age(event.at, now):>5} ago  {event.reason}  {event.about}{times}{_tail(event.message)}"


def _heading(service: Service) -> Iterator[str]:
    ready = service.condition(ConditionType.READY)
    if ready is None:
        yield f"{service.name} in {service.namespace}: the operator has not looked at it yet"
    else:
        said = "ready" if ready.status is ConditionStatus.TRUE else "not ready"
        yield f"{service.name} in {service.namespace}: {said} ({ready.reason}){_tail(ready.message)}"
    objectives = service.spec.get("objectives") or {}
    yield (
        f"  objectives: TTFT {objectives.get('ttftMilliseconds', '-')} ms and TPOT "
        f"{objectives.get('tpotMilliseconds', '-')} ms for {objectives.get('percentile', 90)} % of requests"
    )


def _counts(service: Service) -> Iterator[str]:
    status, external = service.status, service.scaling is Scaling.EXTERNAL
    if external:
        yield "  scaling is External: someone else writes the pools' replicas, kLLM only advises"
    if service.paused:
        yield "  paused: kLLM observes and takes no step; kubectl kllm resume ends that"
    told = status.advised if external else status.plan
    if told is not None:
        word = "advice" if external else "plan"
        yield f"  {word}: prefill {told.prefill}, decode {told.decode} ({told.reason}){_tail(told.message)}"
    elif not external:
        yield "  nothing is planned yet"


def _pool(service: Service, role: Role) -> Iterator[str]:
    pool, spec = service.pool(role), service.spec.get(role.value) or {}
    least = spec.get("minReplicas", 1)
    bounds = f"{least}-{spec.get('maxReplicas', max(1, least))}"
    others = ("warming", "draining", "failed", "slots", "outdated")
    rest = "".join(f", {count} {name}" for name in others if (count := getattr(pool, name)))
    yield f"  {role}: {pool.desired} wanted of {bounds}, {pool.ready} ready{rest}"
    load = pool.load
    if load.value_milli is None:
        yield "    load: unknown"
    else:
        by = f" by {load.term}" if load.term else ""
        told = f"predicted {milli(load.predicted_milli)}, measured {milli(load.measured_milli)}"
        yield f"    load: {milli(load.value_milli)}{by} ({told}); 1.00 is the boundary of the objective"
    if pool.start_milliseconds is not None:
        phases = ", ".join(f"{each.name} {seconds(each.milliseconds)}" for each in pool.start_phases)
        yield f"    last start: {seconds(pool.start_milliseconds)}" + (f" ({phases})" if phases else "")


def _is_notable(condition: Condition) -> bool:
    return any(condition.type == kind and condition.status is not good for kind, good in _GOOD.items())


def _tail(message: str) -> str:
    return f": {message}" if message else ""
