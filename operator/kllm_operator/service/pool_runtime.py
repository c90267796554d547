"""One standalone pool: from its spec to pods, and back to its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import PoolStatus
from kllm_core.objectives import Role
from kllm_operator.kube.cache import Key
from kllm_operator.kube.resources import INFERENCE_SERVICES, PODS, Document, Resource
from kllm_operator.loop.report import Report
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.conditions import standalone_conditions
from kllm_operator.service.facts import Facts
from kllm_operator.service.judging import judged
from kllm_operator.service.kept import RESYNC_SECONDS, TOKEN_SECONDS, Kept
from kllm_operator.service.pools import POOLS
from kllm_operator.service.shared import Shared, token_is_held
from kllm_operator.service.standalone import PoolKey, SinglePool, asked_service, members, present_service, role_of
from kllm_operator.service.status import pool_status
from kllm_operator.service.writer import StatusWriter


class PoolRuntime(Kept):
    """One pool. See `Kept`.

    Args:
        cluster: where it is.
        document: its object.
    """

    def __init__(self, cluster: Cluster, document: Mapping[str, Any]) -> None:
        self._role, self._key = role_of(document), PoolKey.of(document)
        pool = SinglePool(cluster.api, cluster.caches, document)
        super().__init__(cluster, document, pools=pool, status=_PoolWriter(cluster, self._key[:2], pool))
        self._shared = Shared(cluster)

    @property
    def service(self) -> Key:
        """Namespace and name of the service that its instances are of."""
        return present_service(self._document) or asked_service(self._document)

    @property
    def summary(self) -> tuple[Key, Role, PoolStatus] | None:
        """Its service, its role and the status as last written; None as long as no spec was accepted."""
        live = self._pools.of(self._role)
        if self._service is None or live is None:
            return None
        return self.service, self._role, PoolStatus.model_validate(live.get("status") or {})

    async def reconcile(self, document: Mapping[str, Any]) -> float:
        """Bring everything to what the spec asks for, as far as that is possible now; seconds until the next look.

        Raises:
            KubeError: something could not be written; the status says what.
        """
        self._document, self._failing = document, True
        pools = members(self._cluster.caches, self.service)
        self._judge(pools)
        failure = await self._attempt(lambda service: self._converge(service, pools))
        await self._status.write(self._facts(), self._pools.of(self._role) or document)
        if failure is not None:
            raise failure
        self._failing = False
        return RESYNC_SECONDS if self._holds_token else TOKEN_SECONDS

    def notice(self, resource: Resource, document: Mapping[str, Any]) -> bool:
        """Take the word that the pool, or something of it, has changed; whether that calls for a reconcile."""
        del document
        if self._fleet is None:
            return True
        if resource is PODS:
            self._fleet.notice()
            return False
        if resource is POOLS[self._role]:
            self._fleet.counts_changed()
        return True

    @property
    def _holds_token(self) -> bool:
        return token_is_held(self._cluster, self.service, pool=self.uid)

    def _judge(self, pools: list[Document]) -> None:
        """Accept the spec, or say why not and keep the last accepted one."""
        uids = [pool["metadata"]["uid"] for pool in pools]
        older = pools[: uids.index(self.uid)] if self.uid in uids else pools
        asked = asked_service(self._document)
        has_service = self._cluster.caches.of(INFERENCE_SERVICES).get(*asked) is not None
        is_taken = has_service and self._shared.find(asked, pools) is None
        verdict, service = judged(self._document, self._cluster.render.engine, older=older, is_taken=is_taken)
        self._service = service or self._service
        self._conclude(verdict)

    async def _converge(self, service: InferenceService, pools: list[Document]) -> None:
        if self._paused:
            account = self._shared.find(self.service, pools)
        else:
            account = await self._shared.ensure(service, pools)
        if account is not None:
            await self._look_at_token(service, account)
        self._keep_fleet(service)

    async def _look_at_token(self, service: InferenceService, account: str) -> None:
        """Have the fleet token. Deleted, it is made anew, by whichever pool, as soon as no engine has the old one."""
        if self._token is not None and self._holds_token:
            return
        is_held = self._token is not None and token_is_held(self._cluster, self.service)
        make = not self._paused and not is_held
        await self._use_token(await self._shared.token(service, account, make=make))

    def _published(self, report: Report) -> None:
        # Objectives are of both roles together: what a planner thinks of one alone advises nobody.
        self._report = replace(report, advised=None)
        self._want_if_news(self._key, self._pools.of(self._role))


class _PoolWriter(StatusWriter):
    """Writes the status of the pool alone."""

    def _statuses(self, facts: Facts, document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Document]]:
        before, generation, role = document.get("status") or {}, facts.generation, role_of(document)
        status = pool_status(
            facts, role, before, generation=generation, now=self._cluster.now(), states=standalone_conditions
        )
        return [(document, status)]
