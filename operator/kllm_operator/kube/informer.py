"""Fills the caches and keeps them so: kopf watches, and does nothing else.

kopf has no part in what is decided and writes nothing. Its handlers take objects into caches and tell whose they are.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import kopf
import structlog

from kllm_core.labels import MANAGED_BY, MANAGER
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import ObjectCache
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.login import Login, LoginError
from kllm_operator.kube.resources import DECODE_POOLS, INFERENCE_SERVICES, PREFILL_POOLS, Document, Resource
from kllm_operator.kube.sweep import sweep

Changed = Callable[[Resource, Document], None]
"""Called with each object that is new, changed or gone. It must not wait or raise."""

OURS = f"{MANAGED_BY}={MANAGER}"
"""Selects what the operator made; the API server leaves out the rest."""

_MADE_BY_PEOPLE = (INFERENCE_SERVICES, PREFILL_POOLS, DECODE_POOLS)
_SWEEP_SECONDS = 300.0
"""Between two sweeps when no watch says that it was away."""
_SECOND_SWEEP_SECONDS = 30.0
"""After watches have begun anew, when the last of them has: they come back one by one, and not all have objects."""
_SILENT_SECONDS = 900.0
"""For each watched namespace: far above the pause between two sweeps and the time in which lists of a server that is
away fail. What lasts longer will not end."""
_BLIND_SWEEPS = 3
"""One may see what a watch is about to tell."""
_GATHER_SECONDS = 1.0
"""For what watches that begin anew list."""
_PAGE = 500
_CONNECT_SECONDS = 5.0
_REQUEST_SECONDS = 30.0

_log = structlog.get_logger(__name__)


def selector(resource: Resource) -> str:
    """Label selector of what is cached of a kind."""
    return "" if resource in _MADE_BY_PEOPLE else OURS


class Informer:
    """Keeps caches up to date.

    Args:
        login: loaded.
        api: for lists.
        caches: what is kept.
        namespaces: that are watched; empty is all.
        changed: hears of all news.
        corrected: hears of how many objects of a kind a sweep found wrong.
    """

    def __init__(
        self,
        login: Login,
        api: KubeApi,
        caches: Caches,
        *,
        namespaces: Collection[str],
        changed: Changed,
        corrected: Callable[[Resource, int], None],
    ) -> None:
        self._login, self._api, self._caches = login, api, caches
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._changed = changed
        self._corrected = corrected
        self._listed = asyncio.Event()
        self._heard = self._found = self._blind = 0
        self._swept_at: float | None = None

    @property
    def trouble(self) -> str:
        """Why this process learns nothing any more, in words; empty if it does, or would if there were a server.

        A server that is away ends each list with an error, and that is progress. A watch is silent when nothing
        changes; it is lost when sweeps find changes again and again while no watch tells of anything.
        """
        if self._swept_at is not None:
            silent = asyncio.get_running_loop().time() - self._swept_at
            if silent > _SILENT_SECONDS * len(self._namespaces):
                return f"caches were not compared with the API server for {silent:.0f} s"
        if self._blind >= _BLIND_SWEEPS:
            return f"no watch told of anything while {self._blind} sweeps found changes"
        return ""

    async def fill(self) -> None:
        """Read all there is, so that nobody decides on half of it.

        Raises:
            KubeError: it cannot be read.
        """
        for cache in self._caches:
            for namespace in self._namespaces:
                listed = await self._api.list(cache.resource, namespace=namespace, labels=selector(cache.resource))
                for document in listed:
                    self._take(cache, document)
            _log.info("CacheFilled", resource=cache.resource.qualified, objects=len(cache))

    async def watch(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Follow all changes until told to stop.

        Args:
            stop: set by the caller.
            ready: set as soon as signals may be taken over.

        Raises:
            Exception: the watch cannot go on; the process is to end.
        """
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._log_in)
        for cache in self._caches:
            resource = cache.resource
            kopf.on.event(
                resource.group, resource.version, resource.plural, registry=registry, id=f"cache-{resource.plural}"
            )(self._handler(cache))
        namespaces = [each for each in self._namespaces if each is not None]
        await kopf.operator(
            registry=registry, settings=_settings(self._caches), standalone=True, stop_flag=stop, ready_flag=ready,
            clusterwide=not namespaces, namespaces=namespaces,
        )  # fmt: skip

    async def sweep(self) -> None:
        """Correct what watches missed, whenever they begin anew and from time to time, until cancelled."""
        pause = _SECOND_SWEEP_SECONDS
        self._swept_at = asyncio.get_running_loop().time()
        while True:
            heard, found = self._heard, self._found
            # Replicas are not to sweep all at once.
            begun_anew = await self._begun_anew(pause * random.uniform(0.9, 1.1))  # noqa: S311
            await self.catch_up()
            if self._heard != heard:
                self._blind = 0
            elif self._found != found:
                self._blind += 1
            pause = _SECOND_SWEEP_SECONDS if begun_anew else _SWEEP_SECONDS

    async def catch_up(self) -> bool:
        """Correct at once what watches missed or have not told yet; whether all could be read."""
        return all([await self._sweep(cache) for cache in self._caches])

    async def _begun_anew(self, seconds: float) -> bool:
        """Wait until a watch begins anew, for so long at most; whether one has."""
        try:
            async with asyncio.timeout(seconds):
                await self._listed.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(_GATHER_SECONDS)
        self._listed.clear()
        return True

    async def _sweep(self, cache: ObjectCache) -> bool:
        resource = cache.resource
        try:
            wrong = await sweep(self._api, cache, labels=selector(resource), namespaces=self._namespaces)
        except Exception as error:  # noqa: BLE001  the next sweep comes; meanwhile the watch goes on
            _log.warning("SweepFailed", resource=resource.qualified, error=str(error), kind=type(error).__name__)
            return False
        finally:
            self._swept_at = asyncio.get_running_loop().time()
        self._found += len(wrong)
        self._corrected(resource, len(wrong))
        for document in wrong:
            self._changed(resource, document)
        return True

    def _handler(self, cache: ObjectCache) -> Callable[..., Awaitable[None]]:
        async def take(event: Any, **_: Any) -> None:
            document = event["object"]
            self._heard += 1
            if event["type"] is None:
                # The watch lists what there is, and says nothing of what went while it was away.
                self._listed.set()
            if event["type"] != "DELETED":
                self._take(cache, document)
            elif cache.remove(document):
                self._changed(cache.resource, document)

        return take

    def _take(self, cache: ObjectCache, document: Document) -> None:
        if cache.put(document):
            self._changed(cache.resource, document)

    async def _log_in(self, **_: Any) -> kopf.ConnectionInfo:
        try:
            await self._login.load()
        except LoginError as error:
            raise kopf.PermanentError(str(error)) from error
        found = await self._login.credentials()
        return kopf.ConnectionInfo(
            server=found.server,
            insecure=found.insecure,
            ca_path=found.ca_path,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
            scheme=found.scheme,
            token=found.token,
        )


class _NoDifferences(kopf.DiffBaseStorage):
    """Spares kopf a deep copy of each object that it hears of: it looks for differences, which nobody here asks for."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object counts."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing is kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


class _Backoffs:
    """Seconds between attempts of a watch, without an end: the server will come back, and caches serve meanwhile."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.5
        while True:
            yield pause * random.uniform(0.8, 1.2)  # noqa: S311  replicas are not to come all at once
            pause = min(pause * 2, 10.0)


def _settings(caches: Caches) -> kopf.OperatorSettings:
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.finalizer = "kllm.io/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="kllm.io")
    settings.persistence.diffbase_storage = _NoDifferences()
    settings.scanning.disabled = True
    settings.networking.connect_timeout = _CONNECT_SECONDS
    settings.networking.request_timeout = _REQUEST_SECONDS
    settings.networking.error_backoffs = _Backoffs()
    settings.watching.connect_timeout = _CONNECT_SECONDS
    settings.watching.chunk_size = _PAGE
    for cache in caches:
        resource, labels = cache.resource, selector(cache.resource)
        if labels:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = labels
    return settings
