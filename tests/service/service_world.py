"""A keeper on an API server in memory, with watches, a queue, and hands that play the kubelet and other controllers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable

from kube.fake_api import FakeApi
from substrate.polling import polled

from kllm_core import labels
from kllm_operator.history.folder import HistoryFolder
from kllm_operator.kube.cache import key_of
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import NotLeadingError
from kllm_operator.kube.queue import Backoff, WorkQueue
from kllm_operator.kube.recorder import Recorder
from kllm_operator.kube.resources import (
    DECODE_POOLS,
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    PODS,
    PREFILL_POOLS,
    resource_of,
)
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.metrics import OperatorMetrics
from kllm_operator.render.config import RenderConfig, RouterConfig
from kllm_operator.render.engine import EngineConfig
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.keeper import Keeper

RENDER = RenderConfig(engine=EngineConfig(image="engine:1"), router=RouterConfig(image="router:1"))
POOLS = (PREFILL_POOLS, DECODE_POOLS)


def service(name="chat", **spec):
    """An InferenceService as a user writes it."""
    role = {"minReplicas": 1, "maxReplicas": 3, "accelerator": {"count": 0}}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"uri": "demo://smollm2-135m", "name": "smollm2"},
            "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
            "prefill": role,
            "decode": role,
            **spec,
        },
    }


def pool(kind="PrefillPool", name="chat", *, metadata=None, **spec):
    """A standalone pool as a user writes it."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": "default", **(metadata or {})},
        "spec": {
            "replicas": 1,
            "minReplicas": 1,
            "maxReplicas": 3,
            "accelerator": {"count": 0},
            "model": {"uri": "demo://smollm2-135m", "name": "smollm2"},
            "objectives": {"ttftMilliseconds": 1000, "tpotMilliseconds": 150},
            **spec,
        },
    }


class FencedApi:
    """What a replica's own client does: the same calls, of which writes are refused while it may not lead."""

    def __init__(self, api, leading):
        self._api, self._leading = api, leading

    def __getattr__(self, verb):
        call = getattr(self._api, verb)

        async def fenced(*arguments, **named):
            if verb not in {"get", "list"} and not self._leading():
                raise NotLeadingError("this replica does not lead")
            return await call(*arguments, **named)

        return fenced


class World:
    """Everything around one keeper.

    Attributes:
        leading: whether this replica may write.
        reconciles: that were begun.

    Args:
        history: where histories are written; None: nowhere.
    """

    def __init__(self, history: HistoryFolder | None = None) -> None:
        self.api = FakeApi()
        self.caches = Caches()
        self.metrics = OperatorMetrics()
        self.leading, self.reconciles = True, 0
        self.fenced = FencedApi(self.api, lambda: self.leading)
        self.recorder = Recorder(self.fenced, instance="test")
        self.queue = WorkQueue(self._reconcile, backoff=Backoff(first_seconds=0.02, most_seconds=0.1))
        cluster = Cluster(
            api=self.fenced, caches=self.caches, recorder=self.recorder, metrics=self.metrics, render=RENDER,
            loop=LoopSettings().with_values({"tick_seconds": 0.2}), want=self.queue.add,
            wall=lambda: dt.datetime(2026, 1, 1, tzinfo=dt.UTC), history=history,
        )  # fmt: skip
        self.keeper = Keeper(cluster)
        self.api.watchers.append(self._watched)

    async def successor(self) -> World:
        """Another replica at the same API server, after this one has gone; it has seen what there is."""
        await self.keeper.close()
        self.leading = False
        other = World()
        other.api = other.fenced._api = self.api
        self.api.watchers[:] = [other._watched]
        for document in self.api.objects.values():
            other._watched("ADDED", document)
        return other

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.queue.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.keeper.close()
            await self.recorder.close()

    async def _reconcile(self, key):
        self.reconciles += 1
        return await self.keeper.reconcile(key)

    def _watched(self, what, document):
        resource = resource_of(document)
        if resource not in {cache.resource for cache in self.caches}:
            return
        cache = self.caches.of(resource)
        news = cache.remove(document) if what == "DELETED" else cache.put(document)
        if news:
            self.keeper.notice(resource, document)

    async def until(self, condition: Callable[[], object], *, seconds: float = 15.0):
        """Return what a condition gives as soon as that is true; an object that is not there is no such thing."""

        def found():
            with contextlib.suppress(KeyError, StopIteration):
                return condition()

        async with asyncio.timeout(seconds):
            await polled(found)
        return found()

    async def settled(self):
        """Return once reconciles and ticks write nothing any more."""
        while True:
            before = len(self.api.writes)
            await asyncio.sleep(0.5)
            if len(self.api.writes) == before:
                return

    def service(self, name="chat"):
        return self.api.one(INFERENCE_SERVICES, name)

    def condition(self, kind, name="chat", resource=INFERENCE_SERVICES):
        """A condition as (status, reason); its message is in `message`."""
        return next(each for each in self.api.one(resource, name)["status"]["conditions"] if each["type"] == kind)

    def is_condition(self, kind, status, reason=None, **which):
        found = self.condition(kind, **which)
        return found["status"] == status and reason in (None, found["reason"])

    def pods(self, role=None):
        found = [document for (resource, _, _), document in self.api.objects.items() if resource == PODS]
        if role is None:
            return found
        return [each for each in found if each["metadata"]["labels"][labels.ROLE] == role]

    def events(self):
        return [document for (resource, _, _), document in self.api.objects.items() if resource == EVENTS]

    def serve(self, pod):
        """Kubelet and agent: the pod serves."""
        at = "2026-01-01T00:00:01Z"
        status = {
            "phase": "Running",
            "podIP": "127.0.0.9",
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": at}
                for kind in ("PodScheduled", "Initialized", "Ready")
            ],
            "containerStatuses": [{"name": "engine", "ready": True, "state": {"running": {"startedAt": at}}}],
        }
        self.api.change(pod, lambda document: document.update(status=status))

    def fail(self, pod, message):
        """The kubelet: the pod's engine has ended."""
        ended = {"exitCode": 1, "message": message, "reason": "Error"}
        status = {"phase": "Failed", "containerStatuses": [{"name": "engine", "state": {"terminated": ended}}]}
        self.api.change(pod, lambda document: document.update(status=status))

    def serve_routers(self, ready=1):
        deployment = self.api.one(DEPLOYMENTS, "chat-router")
        self.api.change(deployment, lambda document: document.update(status={"readyReplicas": ready}))

    def replicas(self, resource):
        role = "prefill" if resource is PREFILL_POOLS else "decode"
        return self.api.one(resource, f"chat-{role}")["spec"]["replicas"]

    def annotate(self, document, **values):
        def change(wanted):
            annotations = wanted["metadata"].setdefault("annotations", {})
            for name, value in values.items():
                annotations[f"kllm.io/{name}"] = value

        return self.api.change(document, change)

    def respec(self, name="chat", **spec):
        return self.api.change(self.service(name), lambda document: document["spec"].update(spec))

    def names(self):
        """Kind/name of everything but events."""
        return sorted(
            f"{resource.kind}/{key_of(document)[1]}"
            for (resource, _, _), document in self.api.objects.items()
            if resource != EVENTS
        )


async def ready(world, **spec):
    """A service that serves."""
    world.api.seed(service(**spec))
    await world.until(lambda: len(world.pods("prefill")) == 1 and len(world.pods("decode")) == 1)
    for pod in world.pods():
        world.serve(pod)
    await world.until(lambda: world.api.one(DEPLOYMENTS, "chat-router"))
    world.serve_routers()
    await world.until(lambda: world.is_condition("Ready", "True"))
    await world.settled()
