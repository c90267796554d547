"""One standalone pool: from its spec to pods, and back to its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import PoolStatus
from kllm_core.labels import PAUSED
from kllm_core.objectives import Role
from kllm_operator.kube.cache import Key
from kllm_operator.kube.exceptions import KubeError, NotLeadingError
from kllm_operator.kube.resources import INFERENCE_SERVICES, PODS, Document, Resource
from kllm_operator.loop.report import Report
from kllm_operator.service.children import trouble_of
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.conditions import standalone_conditions
from kllm_operator.service.facts import Facts, Trouble, Verdict
from kllm_operator.service.fleet import Fleet
from kllm_operator.service.judging import judged
from kllm_operator.service.pools import POOLS
from kllm_operator.service.shared import Shared, token_is_held
from kllm_operator.service.standalone import PoolKey, SinglePool, asked_service, members, present_service, role_of
from kllm_operator.service.status import pool_status
from kllm_operator.service.telling import Teller
from kllm_operator.service.writer import StatusWriter

_RESYNC_SECONDS = 600.0
"""Between two looks at a pool of which nothing was heard: for what no event tells."""
_TOKEN_SECONDS = 30.0
"""Between two looks at the fleet token while no engine of the pool has it: no event tells that it is another one."""


class PoolRuntime:
    """One pool, by its uid: one that is made anew under the same name gets a runtime of its own.

    Reconciles of one runtime do not overlap, and `close` comes after the last one.

    Args:
        cluster: where it is.
        document: its object.
    """

    def __init__(self, cluster: Cluster, document: Mapping[str, Any]) -> None:
        self.uid = str(document["metadata"]["uid"])
        self._cluster, self._document = cluster, document
        self._role, self._key = role_of(document), PoolKey.of(document)
        self._pool = SinglePool(cluster.api, cluster.caches, document)
        self._shared = Shared(cluster)
        self._teller = Teller(cluster, lambda: self._document)
        self._status = _PoolWriter(cluster, self._key[:2], self._pool)
        self._service: InferenceService | None = None
        self._verdict = Verdict()
        self._trouble: Trouble | None = None
        self._report: Report | None = None
        self._fleet: Fleet | None = None
        self._failing = False
        self._token: str | None = None

    @property
    def service(self) -> Key:
        """Namespace and name of the service that its instances are of."""
        return present_service(self._document) or asked_service(self._document)

    @property
    def summary(self) -> tuple[Key, Role, PoolStatus] | None:
        """Its service, its role and the status as last written; None as long as no spec was accepted."""
        live = self._pool.of(self._role)
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
        failure: KubeError | None = None
        self._trouble = None
        if self._service is not None:
            try:
                await self._converge(self._service, pools)
            except KubeError as error:
                failure, self._trouble = error, trouble_of(error)
        if isinstance(failure, NotLeadingError):
            raise failure
        await self._status.write(self._facts(), self._pool.of(self._role) or document)
        if failure is not None:
            raise failure
        self._failing = False
        return _RESYNC_SECONDS if self._holds_token else _TOKEN_SECONDS

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
    def ticking_seconds(self) -> float:
        """For how long the present tick of its loop lasts; 0 without any."""
        return 0.0 if self._fleet is None else self._fleet.ticking_seconds

    def halt(self) -> None:
        """Take no more steps: the pool is being deleted, and what goes is not to be replaced."""
        if self._fleet is not None:
            self._fleet.halt()

    async def close(self) -> None:
        """Leave the pool as it is."""
        if self._fleet is not None:
            await self._fleet.close()
            self._fleet = None

    @property
    def _paused(self) -> bool:
        return (self._document["metadata"].get("annotations") or {}).get(PAUSED) == "true"

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
        if verdict != self._verdict and not verdict.accepted:
            self._cluster.recorder.tell(
                self._document, reason=verdict.reason, note=verdict.message, action="Accept", warning=True
            )
        self._verdict = verdict

    async def _converge(self, service: InferenceService, pools: list[Document]) -> None:
        if self._paused:
            account = self._shared.find(self.service, pools)
        else:
            account = await self._shared.ensure(service, pools)
        if account is not None:
            await self._look_at_token(service, account)
        if self._fleet is not None:
            self._fleet.change(service, paused=self._paused)
        elif self._token is not None:
            self._fleet = Fleet(
                self._cluster, service, self._pool, token=self._token, tell=self._teller.tell,
                publish=self._published, paused=self._paused,
            )  # fmt: skip

    async def _look_at_token(self, service: InferenceService, account: str) -> None:
        """Have the fleet token. Deleted, it is made anew, by whichever pool, as soon as no engine has the old one."""
        if self._token is not None and self._holds_token:
            return
        is_held = self._token is not None and token_is_held(self._cluster, self.service)
        make = not self._paused and not is_held
        token = await self._shared.token(service, account, make=make)
        if token is None or token == self._token:
            return
        self._token = token
        await self.close()

    def _facts(self) -> Facts:
        return Facts(
            generation=int(self._document["metadata"]["generation"]),
            verdict=self._verdict,
            service=self._service,
            revisions={} if self._fleet is None else self._fleet.revisions,
            report=self._report,
            trouble=self._trouble,
            paused=self._paused,
        )

    def _published(self, report: Report) -> None:
        # Objectives are of both roles together: what a planner thinks of one alone advises nobody.
        self._report = replace(report, advised=None)
        live = self._pool.of(self._role)
        # What has failed comes again by itself, after a pause that ticks are not to shorten.
        if live is not None and not self._failing and self._status.differs(self._facts(), live):
            self._cluster.want(self._key)


class _PoolWriter(StatusWriter):
    """Writes the status of the pool alone."""

    def _statuses(self, facts: Facts, document: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Document]]:
        before, generation, role = document.get("status") or {}, facts.generation, role_of(document)
        status = pool_status(
            facts, role, before, generation=generation, now=self._cluster.now(), states=standalone_conditions
        )
        return [(document, status)]
