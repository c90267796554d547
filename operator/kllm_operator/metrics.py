"""The operator's metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from kllm_core.metrics import OPERATOR_PREFIX

_API_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WORK_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """Metrics of one process. Hears of API calls and of the work queue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = OPERATOR_PREFIX, self.registry
        self._calls = Counter(
            f"{prefix}_api_calls_total", "Requests to the API server, by what became of them.",
            ("verb", "resource", "code"), registry=registry,
        )  # fmt: skip
        self._call_seconds = Histogram(
            f"{prefix}_api_call_seconds", "Duration of requests to the API server.", ("verb",),
            buckets=_API_BOUNDS, registry=registry,
        )  # fmt: skip
        self._reconciles = Counter(
            f"{prefix}_reconciles_total", "Reconciles of services and pools.", ("outcome",), registry=registry
        )
        self._reconcile_seconds = Histogram(
            f"{prefix}_reconcile_seconds", "Duration of reconciles.", buckets=_WORK_BOUNDS, registry=registry
        )
        self._wait_seconds = Histogram(
            f"{prefix}_queue_wait_seconds", "Time from the wish for a reconcile to its beginning.",
            buckets=_WORK_BOUNDS, registry=registry,
        )  # fmt: skip
        self._depth = Gauge(f"{prefix}_queue_depth", "Services and pools that wait for a reconcile.", registry=registry)
        self._leader = Gauge(f"{prefix}_leader", "1 on the replica that leads.", registry=registry)
        self._services = Gauge(f"{prefix}_services", "Services that this replica keeps.", registry=registry)
        self.corrections = Counter(
            f"{prefix}_cache_corrections_total", "Objects whose watch had missed a change.", ("resource",),
            registry=registry,
        )  # fmt: skip
        self.decisions = Counter(
            f"{prefix}_steps_total", "Steps that control loops took, by kind and how they ended.", ("step", "outcome"),
            registry=registry,
        )  # fmt: skip

    def called(self, *, verb: str, resource: str, code: str, seconds: float) -> None:
        """A request to the API server has ended."""
        self._calls.labels(verb, resource, code).inc()
        self._call_seconds.labels(verb).observe(seconds)

    def waited(self, seconds: float) -> None:
        """A key was taken from the queue."""
        self._wait_seconds.observe(seconds)

    def worked(self, seconds: float, *, failed: bool) -> None:
        """A reconcile has ended."""
        self._reconciles.labels("error" if failed else "success").inc()
        self._reconcile_seconds.observe(seconds)

    def watch(self, *, depth: Callable[[], float], leading: Callable[[], float], services: Callable[[], float]) -> None:
        """Have these asked at each scrape."""
        self._depth.set_function(depth)
        self._leader.set_function(leading)
        self._services.set_function(services)

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self.registry)
