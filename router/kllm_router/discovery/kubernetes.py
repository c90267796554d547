"""Instances of a service on a cluster: its engine pods, as the API server tells of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import structlog

from kllm_core import labels
from kllm_core.objectives import Role
from kllm_router.discovery.exceptions import ApiServerError, DiscoveryError, ExpiredError
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.discovery.pod_source import Pod, PodEvent, PodSource, PodSourceSettings
from kllm_router.pauses import backoff

if TYPE_CHECKING:
    from kllm_router.discovery.access import Access
    from kllm_router.metrics import DiscoveryMetrics

AGENT_PORT = 7300

_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_LISTED_PHASES = frozenset({"Running", "Unknown"})
"""Unknown says only that the kubelet is silent; whether the instance lives, its agent tells."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_WISH_SECONDS = 30.0
"""Longest pause that the API server may ask for."""

_log = structlog.get_logger(__name__)


def instance_of(pod: Pod) -> DiscoveredInstance | None:
    """The instance in an engine pod; None for a slot and for a pod that runs nothing yet, or nothing any more.

    A pod that is being deleted is still one: its agent says that it drains, and its streams may finish.
    """
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    name, host = metadata.get("name"), status.get("podIP")
    role = _part(metadata, "labels").get(labels.ROLE)
    if not (isinstance(name, str) and name and isinstance(host, str) and host):
        return None
    if role not in set(Role) or status.get("phase") not in _LISTED_PHASES:
        return None
    return DiscoveredInstance(name, Role(role), f"[{host}]:{AGENT_PORT}" if ":" in host else f"{host}:{AGENT_PORT}")


class PodWatcher:
    """Follows the engine pods of one service.

    Args:
        access: the way to the API server.
        service: name of the InferenceService.
        namespace: of its pods; None takes that of `access`.
        metrics: told how it goes.
        settings: bounds of each call.
        rng: spreads the calls of many routers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        access: Access,
        *,
        service: str,
        metrics: DiscoveryMetrics,
        namespace: str | None = None,
        settings: PodSourceSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = access
        self._namespace = namespace or access.namespace
        self._selector = f"{labels.SERVICE}={service},{labels.COMPONENT}={labels.COMPONENT_ENGINE}"
        self._metrics = metrics
        self._settings = settings or PodSourceSettings()
        self._rng = rng or random.Random()  # noqa: S311  guards nothing
        self._clock = clock
        self._instances: dict[str, DiscoveredInstance] = {}
        self._listed = False
        self._away_since: float | None = None
        self._problem = ""

    async def changes(self) -> AsyncIterator[list[DiscoveredInstance]]:
        """Yield the instances as soon as they are known, and again after each change.

        While the API server does not answer, the last ones stay in force.
        """
        pauses = self._pauses()
        while True:
            asked = 0.0
            try:
                async with self._source() as source:
                    changed, version = self._replace(*await source.list())
                    if changed:
                        yield self._ordered()
                    while True:
                        async with contextlib.aclosing(source.watch(version)) as events:
                            async for event in events:
                                pauses, version = self._pauses(), event.version
                                if self._take(event):
                                    yield self._ordered()
                        await asyncio.sleep(next(pauses))
            except DiscoveryError as error:
                asked = self._failed(error)
            await asyncio.sleep(max(asked, next(pauses)))

    # --- inside

    def _source(self) -> PodSource:
        return PodSource(self._access, namespace=self._namespace, selector=self._selector, settings=self._settings)

    def _pauses(self) -> Iterator[float]:
        return backoff(self._rng, first_seconds=_FIRST_PAUSE_SECONDS, most_seconds=_LONGEST_PAUSE_SECONDS)

    def _ordered(self) -> list[DiscoveredInstance]:
        return sorted(self._instances.values(), key=lambda instance: instance.id)

    def _replace(self, pods: list[Pod], version: str) -> tuple[bool, str]:
        """Take over a list; say whether it is news."""
        instances = {instance.id: instance for pod in pods if (instance := instance_of(pod)) is not None}
        changed = not self._listed or instances != self._instances
        self._instances, self._listed = instances, True
        self._metrics.listed()
        self._reached()
        return changed, version

    def _take(self, event: PodEvent) -> bool:
        """Take over an event; say whether it is news."""
        if event.kind not in _CHANGES:
            self._reached()
            return False
        name = str(_part(event.pod, "metadata").get("name"))
        before = self._instances.pop(name, None)
        after = None if event.kind == "DELETED" else instance_of(event.pod)
        if after is not None:
            self._instances[name] = after
        self._reached()
        return after != before

    def _reached(self) -> None:
        self._metrics.reached(len(self._instances))
        if self._away_since is not None:
            away = round(self._clock() - self._away_since, 1)
            _log.info("the API server answers again", away_seconds=away, instances=len(self._instances))
        self._away_since, self._problem = None, ""

    def _failed(self, error: DiscoveryError) -> float:
        """Tell of a failure, each kind once; give the seconds that the API server asks to wait."""
        reason, asked = (error.reason, error.retry_after) if isinstance(error, ApiServerError) else ("access", None)
        if isinstance(error, ExpiredError):
            _log.info("pods are listed again", reason=str(error))
            return 0.0
        self._metrics.failed(reason)
        if self._away_since is None:
            self._away_since = self._clock()
        if reason != self._problem:
            self._problem = reason
            _log.warning(
                "the API server does not tell of pods, the last known instances stay",
                server=self._access.server,
                reason=str(error),
                instances=len(self._instances),
            )
        return min(asked or 0.0, _LONGEST_WISH_SECONDS)


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
