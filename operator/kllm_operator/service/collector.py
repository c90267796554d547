"""Metrics of services and standalone pools, out of spec and status: what Prometheus reads is what `kubectl get` shows.

They are made at each scrape, so that one that is gone leaves no series behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import RoleStatus, ServiceStatus
from kllm_core.metrics import LATENCY_BOUNDS_SECONDS, OPERATOR_PREFIX
from kllm_core.objectives import Role
from kllm_operator.kube.cache import Key

_SERVICE = ("namespace", "service")
_MILLI = 1000

Services = Callable[[], Iterable[tuple[InferenceService, ServiceStatus]]]
"""Gives the services that this replica keeps, each with the status that was written last."""

Pools = Callable[[], Iterable[tuple[Key, Role, RoleStatus]]]
"""Gives the standalone pools that this replica keeps: the service that their instances are of, role and status."""


class _Families:
    """One scrape."""

    def __init__(self) -> None:
        self.objective = _family(
            "objective_seconds", "Objective; le is the bound of the routers' histograms that stands for it.",
            "objective", "le",
        )  # fmt: skip
        self.percentile = _family("objective_percentile_ratio", "Share of requests that must meet the objective.")
        self.load = _family("pool_load_ratio", "Load; 1 is the bound of the objective.", "role", "source")
        self.instances = _family("pool_instances", "Instances and slots by state.", "role", "state")
        self.start = _family("pool_last_start_seconds", "Duration of the last start.", "role")
        self.condition = _family("condition", "1 for the status that a condition has.", "type", "status")

    def all(self) -> Iterator[GaugeMetricFamily]:
        """In the order of their declaration."""
        yield from (self.objective, self.percentile, self.load, self.instances, self.start, self.condition)

    def add(self, service: InferenceService, status: ServiceStatus) -> None:
        """Tell of one service."""
        who = (service.metadata.namespace, service.name)
        objectives = service.spec.objectives.objectives()
        for name, seconds in (("ttft", objectives.ttft_seconds), ("tpot", objectives.tpot_seconds)):
            self.objective.add_metric((*who, name, bound_of(seconds)), seconds)
        self.percentile.add_metric(who, objectives.percentile / 100)
        for role in Role:
            told = status.prefill if role is Role.PREFILL else status.decode
            if told is not None:
                self.add_role(who, role, told)
        for condition in status.conditions:
            self.condition.add_metric((*who, condition.type, condition.status.value), 1)

    def add_role(self, service: Key, role: Role, told: RoleStatus) -> None:
        """Tell of one role of a service."""
        who = (*service, role.value)
        loads = {
            "decided": told.load.value_milli,
            "predicted": told.load.predicted_milli,
            "measured": told.load.measured_milli,
        }
        for source, milli in loads.items():
            # Nothing is told of a load that is not known; 0 would be an idle pool.
            if milli is not None:
                self.load.add_metric((*who, source), milli / _MILLI)
        for state in ("desired", "ready", "warming", "draining", "failed", "outdated", "slots", "slots_warming"):
            self.instances.add_metric((*who, state), getattr(told, state))
        if told.start_milliseconds is not None:
            self.start.add_metric(who, told.start_milliseconds / _MILLI)


class ServiceCollector(Collector):
    """Registers with a registry of prometheus_client.

    Args:
        services: asked at each scrape.
        pools: the same.
    """

    def __init__(self, services: Services, pools: Pools = tuple) -> None:
        self._services, self._pools = services, pools

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The families, empty."""
        yield from _Families().all()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families, filled."""
        families = _Families()
        for service, status in self._services():
            families.add(service, status)
        for of, role, told in self._pools():
            families.add_role(of, role, told)
        yield from families.all()


def bound_of(seconds: float) -> str:
    """Label `le` of the routers' narrowest bucket that holds every request which meets an objective."""
    index = bisect_left(LATENCY_BOUNDS_SECONDS, seconds)
    if index == len(LATENCY_BOUNDS_SECONDS):
        return "+Inf"
    return str(floatToGoString(LATENCY_BOUNDS_SECONDS[index]))  # type: ignore[no-untyped-call]


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{OPERATOR_PREFIX}_{name}", text, labels=(*_SERVICE, *labels))
