"""Writes the status of a service and of its pools, when there is something to say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kllm_core.objectives import Role
from kllm_operator.kube.cache import Key
from kllm_operator.kube.exceptions import KubeError, NotFoundError
from kllm_operator.kube.resources import Document, resource_of
from kllm_operator.kube.together import together
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.facts import Facts
from kllm_operator.service.pools import Pools
from kllm_operator.service.status import forgets_load, is_told, is_urgent, pool_status, service_status

_WORDS_SECONDS = 15.0
"""Between two writes that bring only newer loads and words, which change at each tick."""
_SILENT_SECONDS = 60.0
"""For which a load is unknown before that is told in place of the one that was known. A leader that is new, and one on
a busy machine, hears agents and routers late: that says nothing of the service, and each status would be written twice.
Three times the silence after which an agent counts as gone."""


class StatusWriter:
    """Writes each status at most once per call, and only if it has changed.

    Args:
        cluster: where they are.
        service: namespace and name.
        pools: of the service.
    """

    def __init__(self, cluster: Cluster, service: Key, pools: Pools) -> None:
        self._cluster = cluster
        self._service = service
        self._pools = pools
        self._written_at: dict[str, float] = {}
        self._unknown_since: dict[str, float] = {}

    def differs(self, facts: Facts, document: Mapping[str, Any]) -> bool:
        """Whether there is something to write now."""
        return any(self._wants(live, wanted) for live, wanted in self._statuses(facts, document))

    async def write(self, facts: Facts, document: Mapping[str, Any]) -> None:
        """Write what has changed.

        Raises:
            KubeError: it cannot be written.
        """
        statuses = self._statuses(facts, document)
        await together(*(self._write(live, wanted) for live, wanted in statuses if self._wants(live, wanted)))

    def _statuses(self, facts: Facts, document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Document]]:
        now = self._cluster.now()
        statuses = [(document, service_status(facts, document.get("status") or {}, now=now))]
        for role in Role:
            pool = self._pools.of(role)
            if pool is not None:
                before, generation = pool.get("status") or {}, int(pool["metadata"]["generation"])
                statuses.append((pool, pool_status(facts, role, before, generation=generation, now=now)))
        return statuses

    def _wants(self, live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        before, uid = live.get("status") or {}, live["metadata"]["uid"]
        if is_told(wanted, before):
            self._unknown_since.pop(uid, None)
            return False
        if is_urgent(wanted, before):
            return True
        now = asyncio.get_running_loop().time()
        # What is there was written by the leader before this one, which had heard more than this one has yet.
        written_at = self._written_at.setdefault(uid, now)
        if forgets_load(wanted, before):
            return now - self._unknown_since.setdefault(uid, now) >= _SILENT_SECONDS
        self._unknown_since.pop(uid, None)
        return now - written_at >= _WORDS_SECONDS

    async def _write(self, live: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        body = {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "metadata": {key: metadata[key] for key in ("namespace", "name", "uid")},
            "status": wanted,
        }
        self._written_at[metadata["uid"]] = asyncio.get_running_loop().time()
        try:
            self._cluster.caches.put(await self._cluster.api.apply_status(body))
        except KubeError:
            if await self._is_there(live):
                raise

    async def _is_there(self, live: Mapping[str, Any]) -> bool:
        """Whether an object still is; the server has several answers to an apply for one that was deleted."""
        metadata = live["metadata"]
        try:
            found = await self._cluster.api.get(
                resource_of(live), namespace=metadata["namespace"], name=metadata["name"]
            )
        except NotFoundError:
            return False
        return bool(found["metadata"]["uid"] == metadata["uid"])
