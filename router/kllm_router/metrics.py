"""Metrics of the router's data plane. Names are part of its contract with dashboards and alerts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kllm_core.metrics import LATENCY_BOUNDS_SECONDS, ROUTER_PREFIX

if TYPE_CHECKING:
    from kllm_core.objectives import Role
    from kllm_router.interfaces import RequestSummary

SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where worker processes of a router keep their metrics together; set before this module is imported."""
_MOST_KEYS = 200
"""Keys with a label of their own; all further ones are `other`."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """All metrics, in one registry. The page of a worker process has the sums over all workers, past ones included."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._followed: list[tuple[Gauge, Callable[[], float]]] = []
        self._limited_keys: set[str] = set()
        self._requests = self._counter("requests", "Answered requests.", "endpoint", "code")
        self._errors = self._counter(
            "request_errors", "Requests that failed, by the stage they were in.", "stage", "code"
        )
        self._aborts = self._counter("aborts", "Abort calls to engines.", "role", "outcome")
        self._retries = self._counter(
            "retries", "Attempts that followed a failure before the first byte.", "role", "cause", "outcome"
        )
        self._continuations = self._counter(
            "continuations", "Streams that broke and were to go on elsewhere.", "cause", "outcome"
        )
        self._ejections = self._counter("ejections", "Instances that failed too often.", "role", "reason")
        self.ejected = Gauge(
            f"{ROUTER_PREFIX}_ejected_instances",
            "Instances that get nothing new because they failed too often.",
            ("role",),
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self._tokens = self._counter("tokens", "Tokens of finished requests: prompt, cached, completion.", "kind")
        self.inflight = self._sum("inflight_requests", "Requests in work.")
        self.waiting = self._sum("waiting_requests", "Requests that wait for instances to start since none serves.")
        self.connections = self._sum("client_connections", "Open connections.")
        self._limited = self._counter("limited", "Requests that a key's quota refused.", "key")
        self._reloads = self._counter("reloads", "Files of keys and certificates that had changed.", "what", "outcome")
        self._dropped = self._counter("access_log_dropped", "Lines of the access log that were lost.")
        self._replaced = self._counter("workers_replaced", "Worker processes that ended and were started anew.")
        self._stages = {
            name: Histogram(
                f"{ROUTER_PREFIX}_request_{name}_seconds", text, buckets=LATENCY_BOUNDS_SECONDS, registry=self.registry
            )
            for name, text in (
                ("ttft", "Arrival until the first byte for the client."),
                ("tpot", "Mean gap between output tokens after the first."),
                ("queue", "Arrival until the prefill instance began to compute."),
                ("prefill", "First prefill step until the KV was complete."),
                ("bind", "Prefill done until the decode instance was asked."),
                ("transfer", "Decode instance asked until its first byte."),
            )
        }

    def answered(self, endpoint: str, code: int) -> None:
        """One answer was given to a client."""
        self._requests.labels(endpoint, str(code)).inc()

    def aborted(self, role: Role, outcome: str) -> None:
        """One abort call has ended: accepted, refused or failed."""
        self._aborts.labels(role.value, outcome).inc()

    def retried(self, role: Role, cause: str, outcome: str) -> None:
        """A failure before the first byte was answered: served, failed_again, exhausted, over_budget or no_instance."""
        self._retries.labels(role.value, cause, outcome).inc()

    def continued(self, cause: str, outcome: str) -> None:
        """A broken stream was answered: as for `retried`, or not_resumable."""
        self._continuations.labels(cause, outcome).inc()

    def ejected_one(self, role: Role, reason: str) -> None:
        """An instance gets nothing new for a while."""
        self._ejections.labels(role.value, reason).inc()

    def limited(self, key: str) -> None:
        """A key's quota has refused a request."""
        if key not in self._limited_keys:
            if len(self._limited_keys) >= _MOST_KEYS:
                key = "other"
            self._limited_keys.add(key)
        self._limited.labels(key).inc()

    def reloaded(self, what: str, *, used: bool) -> None:
        """A file of keys or a certificate had changed, and could be used or not."""
        self._reloads.labels(what, "used" if used else "refused").inc()

    def dropped(self, lines: int) -> None:
        """Lines of the access log were lost."""
        self._dropped.inc(lines)

    def replaced_worker(self) -> None:
        """This process stands for one that has ended."""
        self._replaced.inc()

    def request_ended(self, summary: RequestSummary) -> None:
        """Count a request that was paired, however it ended."""
        times, usage = summary.times, summary.usage
        if summary.status != 200:
            self._errors.labels(summary.stage, str(summary.status)).inc()
        for name, seconds in (
            ("ttft", times.first_token),
            ("tpot", times.per_output_token),
            ("queue", times.queue),
            ("prefill", times.prefill),
            ("bind", times.bind),
            ("transfer", times.transfer),
        ):
            if seconds is not None:
                self._stages[name].observe(seconds)
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            if tokens:
                self._tokens.labels(kind).inc(tokens)

    def follow(self, gauge: Gauge, value: Callable[[], float]) -> None:
        """Take a gauge's value from a function, at each `refresh`."""
        self._followed.append((gauge, value))

    def refresh(self) -> None:
        """Let followed gauges say what is so now; the pages of other workers are made without asking this one."""
        for gauge, value in self._followed:
            gauge.set(value())

    def text(self) -> bytes:
        """Prometheus' text format."""
        self.refresh()
        if SHARED_FOLDER_VARIABLE not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _sum(self, name: str, text: str) -> Gauge:
        return Gauge(f"{ROUTER_PREFIX}_{name}", text, registry=self.registry, multiprocess_mode="livesum")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{ROUTER_PREFIX}_{name}", text, labels, registry=self.registry)


class DiscoveryMetrics:
    """How well the API server tells of pods.

    Args:
        registry: whose metrics they become.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            # Of several workers the one that is worst off for word of the API server tells.
            return Gauge(f"{ROUTER_PREFIX}_discovery_{name}", text, registry=registry, multiprocess_mode="livemin")

        self._connected = gauge("connected", "1 while the API server tells of pods; else the last known fleet stays.")
        self._instances = gauge("instances", "Instances that are known.")
        self._contact = gauge("last_contact_timestamp_seconds", "When the API server last said anything.")
        self._lists = Counter(f"{ROUTER_PREFIX}_discovery_lists", "Complete lists of pods.", registry=registry)
        self._failures = Counter(
            f"{ROUTER_PREFIX}_discovery_failures",
            "Lists and watches that failed, by reason.",
            ("reason",),
            registry=registry,
        )

    def listed(self) -> None:
        """A complete list has come."""
        self._lists.inc()

    def reached(self, instances: int) -> None:
        """The API server has said something, after which so many instances are known."""
        self._connected.set(1)
        self._instances.set(instances)
        self._contact.set_to_current_time()

    def failed(self, reason: str) -> None:
        """A list or a watch has failed."""
        self._connected.set(0)
        self._failures.labels(reason).inc()


class SharedMetrics:
    """How well routers hear each other.

    Attributes:
        up: 1 while they do.
        routers: others that are heard.
        round_trip: seconds of each exchange.

    Args:
        registry: whose metrics they become.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = f"{ROUTER_PREFIX}_shared"

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", text, registry=registry, multiprocess_mode="livemin")

        self.up = gauge("up", "1 while load is shared with other routers.")
        self.routers = gauge("routers", "Other routers, or other workers, that are heard.")
        self.round_trip = Histogram(
            f"{prefix}_round_trip_seconds",
            "One exchange with Redis.",
            buckets=LATENCY_BOUNDS_SECONDS,
            registry=registry,
        )
        self._errors = Counter(
            f"{prefix}_errors", "What went wrong in exchanges, by reason.", ("reason",), registry=registry
        )

    def failed(self, reason: str) -> None:
        """Something went wrong: address, connection, timeout, refused or garbage."""
        self._errors.labels(reason).inc()
