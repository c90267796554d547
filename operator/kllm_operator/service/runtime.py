"""One InferenceService: from its spec to objects and a running fleet, and back to its status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from kllm_core.conditions import ConditionType, Reason
from kllm_core.fleet import InstanceState
from kllm_core.kinds.base import Scaling
from kllm_core.kinds.manifest import ManifestError, check_service
from kllm_core.kinds.service import InferenceService
from kllm_core.kinds.status import ServiceStatus
from kllm_core.labels import COMPONENT, COMPONENT_ENGINE
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.kube.cache import Key, key_of
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.resources import INFERENCE_SERVICES, PODS, Resource
from kllm_operator.loop.counts import CountsError
from kllm_operator.loop.report import Report
from kllm_operator.render.accepted import recalled
from kllm_operator.render.engine import check_templates
from kllm_operator.render.engine_template import TemplateError
from kllm_operator.render.service import children
from kllm_operator.service.children import Children
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.facts import Facts, Verdict
from kllm_operator.service.kept import RESYNC_SECONDS, TOKEN_SECONDS, Kept
from kllm_operator.service.pools import POOLS, Pools
from kllm_operator.service.routers import addresses, one_knows_fleet, routers
from kllm_operator.service.token import ensure_token, read_token
from kllm_operator.service.writer import StatusWriter

_ROUTER_SECONDS = 0.5
"""Between two questions to routers whether they have found the fleet, which takes them a moment."""

_WITHOUT_TOKEN = frozenset({InstanceState.STARTING, InstanceState.FAILED})

_log = structlog.get_logger(__name__)


class ServiceRuntime(Kept):
    """One service. See `Kept`.

    Args:
        cluster: where it is.
        document: its object.
    """

    def __init__(self, cluster: Cluster, document: Mapping[str, Any]) -> None:
        self._key: Key = key_of(document)
        namespace, name = self._key
        pools = Pools(cluster.api, cluster.caches, namespace=namespace, name=name, uid=str(document["metadata"]["uid"]))
        super().__init__(cluster, document, pools=pools, status=StatusWriter(cluster, self._key, pools))
        self._children = Children(cluster.api, cluster.caches)
        self._rendered: Sequence[Mapping[str, Any]] = ()
        self._judged_generation: int | None = None
        self._knows_fleet: bool | None = None
        self._token_at = 0.0

    @property
    def summary(self) -> tuple[InferenceService, ServiceStatus] | None:
        """The accepted spec and the status as last written; None as long as there is no such spec."""
        live = self._cluster.caches.of(INFERENCE_SERVICES).get(*self._key)
        if self._service is None or live is None:
            return None
        return self._service, ServiceStatus.model_validate(live.get("status") or {})

    async def reconcile(self, document: Mapping[str, Any]) -> float:
        """Bring everything to what the spec asks for, as far as that is possible now; seconds until the next look.

        Raises:
            KubeError: something could not be written; the status says what.
        """
        self._document = document
        self._failing = True
        self._judge(document)
        failure = await self._attempt(self._converge)
        pause = await self._look_at_routers()
        await self._status.write(self._facts(), self._cluster.caches.of(INFERENCE_SERVICES).get(*self._key) or document)
        if failure is not None:
            raise failure
        self._failing = False
        return pause if self._holds_token else min(pause, TOKEN_SECONDS)

    def notice(self, resource: Resource, document: Mapping[str, Any]) -> bool:
        """Take the word that an object of the service has changed; whether that calls for a reconcile.

        Of its instances it does not: their fleet looks at them, and asks for one when it has something to tell.
        """
        if self._fleet is None:
            return True
        if resource is PODS:
            self._fleet.notice()
            return (document["metadata"].get("labels") or {}).get(COMPONENT) != COMPONENT_ENGINE
        if resource in POOLS.values():
            self._fleet.counts_changed()
        return True

    def _judge(self, document: Mapping[str, Any]) -> None:
        """Accept the spec, or say why not and keep the last accepted one; once for each spec."""
        generation = document["metadata"]["generation"]
        if generation == self._judged_generation:
            return
        try:
            self._use(check_service(dict(document)))
            verdict = Verdict()
        except ManifestError as error:
            verdict = Verdict(False, Reason.INVALID_SPEC, "; ".join(error.problems))
        except TemplateError as error:
            verdict = Verdict(False, Reason.TEMPLATE_REFUSED, str(error))
        if self._service is None:
            self._recall(document)
        self._conclude(verdict)
        self._judged_generation = generation

    def _use(self, service: InferenceService) -> None:
        """Take a spec.

        Raises:
            ManifestError: it cannot be carried out.
            TemplateError: one of its templates cannot.
        """
        check_templates(service, self._cluster.render.engine)
        self._rendered = children(service, uid=self.uid, config=self._cluster.render)
        self._service = service

    def _recall(self, document: Mapping[str, Any]) -> None:
        """Go on with the spec that the leader before this one accepted last, if there was one."""
        pool = self._pools.of(Role.PREFILL)
        try:
            service = None if pool is None else recalled(pool, document)
            if service is not None:
                self._use(service)
        except (ManifestError, TemplateError) as error:
            _log.warning(
                "AcceptedSpecNotUsed", namespace=self._key[0], service=self._key[1], error=" ".join(str(error).split())
            )

    async def _converge(self, service: InferenceService) -> None:
        await self._look_at_token(service)
        if not self._paused:
            await self._children.ensure(self._rendered, service=self._key, uid=self.uid)
            await self._seed_counts(service)
        self._keep_fleet(service)

    async def _look_at_token(self, service: InferenceService) -> None:
        """Have the fleet token. Deleted, it is made anew as soon as nothing serves that has the old one."""
        now = asyncio.get_running_loop().time()
        if self._token is not None and (self._holds_token or now - self._token_at < TOKEN_SECONDS):
            return
        api, uid = self._cluster.api, self.uid
        if self._paused:
            token = await read_token(api, service, uid=uid)
        else:
            # Without a status it is not known that anybody has looked at the service yet.
            token = await ensure_token(api, service, uid=uid, new=not self._document.get("status"))
        self._token_at = now
        await self._use_token(token)

    @property
    def _holds_token(self) -> bool:
        """Whether something has the fleet token and could not be spoken to with another one."""
        facts = self._facts()
        there = [each for role in Role for each in (*facts.instances(role), *facts.slots(role))]
        return any(each.state not in _WITHOUT_TOKEN for each in there)

    async def _seed_counts(self, service: InferenceService) -> None:
        """Begin with the least that the spec allows, where someone else will write the counts."""
        if service.spec.scaling is not Scaling.EXTERNAL:
            return
        counts = self._pools.read() or {}
        new = [
            role for role in Role if (pool := self._pools.of(role)) is not None and pool["metadata"]["generation"] == 1
        ]
        wanted = {role: service.spec.role(role).min_replicas if role in new else counts.get(role, 0) for role in Role}
        if new and len(counts) == len(Role):
            seed = DesiredCounts(wanted[Role.PREFILL], wanted[Role.DECODE], "Seeded", "the least that the spec allows")
            try:
                await self._pools.write(seed)
            except CountsError as error:
                raise KubeError(str(error)) from error

    async def _look_at_routers(self) -> float:
        """Hear all routers; as long as the service is not ready, ask whether they have found its fleet."""
        found = addresses(self._cluster.caches, self._key)
        if self._fleet is not None:
            self._fleet.follow_routers(found)
        facts = self._facts()
        if not found or any(facts.serving(role) == 0 for role in Role):
            self._knows_fleet = None
        elif not self._knows_fleet and not self._is_ready:
            self._knows_fleet = await one_knows_fleet(found)
        return _ROUTER_SECONDS if self._knows_fleet is False else RESYNC_SECONDS

    @property
    def _is_ready(self) -> bool:
        conditions = (self._document.get("status") or {}).get("conditions") or ()
        return any(each["type"] == ConditionType.READY and each["status"] == "True" for each in conditions)

    def _facts(self) -> Facts:
        return replace(
            super()._facts(),
            routers=routers(
                self._cluster.caches,
                self._key,
                knows_fleet=self._knows_fleet,
                unshared="" if self._fleet is None else self._fleet.unshared,
            ),
        )

    def _published(self, report: Report) -> None:
        self._report = report
        self._want_if_news(self._key, self._cluster.caches.of(INFERENCE_SERVICES).get(*self._key))
