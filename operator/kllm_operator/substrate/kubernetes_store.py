"""The pods of one service's pools: reads them from the cache and writes them to the API server, never anyone else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import stamina

from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.cache import ObjectCache, key_of
from kllm_operator.kube.exceptions import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    NotLeadingError,
    UnreachableError,
)
from kllm_operator.kube.ownership import controller_of, is_controlled_by
from kllm_operator.kube.resources import DECODE_POOLS, PODS, PREFILL_POOLS, Document
from kllm_operator.render.engine import EngineConfig, engine_pod, engine_revision
from kllm_operator.render.owner import Owner
from kllm_operator.substrate.exceptions import SubstrateError
from kllm_operator.substrate.kubernetes_patches import Patch
from kllm_operator.substrate.kubernetes_pods import Pod, read_pod

Change = Callable[[Pod], Patch | None]

_ROLES = frozenset(role.value for role in Role)
_TRIES = 5
"""For a name that is free, and for a change that nobody gets in between of."""
_ROLE_OF = {PREFILL_POOLS.kind: Role.PREFILL, DECODE_POOLS.kind: Role.DECODE}
_CHECK_SECONDS = 5.0
"""After so long without news the API server is asked: a watch may have missed the end."""


class PodGoneError(SubstrateError):
    """The pod was deleted meanwhile."""


@dataclass(frozen=True)
class PodPlan:
    """What pods are made from.

    Attributes:
        service: whose instances they are.
        config: the operator's part.
        owners: the pools' objects; a role whose pool is not there is missing, and no pod is made for it.
    """

    service: InferenceService
    config: EngineConfig
    owners: Mapping[Role, Owner]


class OwnPods:
    """Pods that the service's pools control.

    Args:
        plan: what pods are made from.
        api: the API server.
        cache: pods, as the watch tells of them.
        suffix: makes the last part of a name.

    Raises:
        TemplateError: a pod template cannot be used.
    """

    def __init__(self, plan: PodPlan, *, api: KubeApi, cache: ObjectCache, suffix: Callable[[], str]) -> None:
        self._api = api
        self._cache = cache
        self._suffix = suffix
        self._read: dict[str, Pod] = {}
        self._unsure: dict[tuple[Role, bool], str] = {}
        self._names: set[tuple[str, str]] = set()
        self._news = asyncio.Event()
        self.use(plan)

    @property
    def prefix(self) -> str:
        """With which all names begin."""
        return f"{self._plan.service.name}-engine-"

    def use(self, plan: PodPlan) -> None:
        """Make pods from another plan from now on.

        Raises:
            TemplateError: a pod template cannot be used; nothing has changed then.
        """
        self._revisions = {role: engine_revision(plan.service, plan.config, role) for role in Role}
        self._plan = plan
        self._pools = {owner.uid: role for role, owner in plan.owners.items()}
        self._names |= {(owner.kind, owner.name) for owner in plan.owners.values()}

    def revision(self, role: Role) -> str:
        """What a new pod of a role is made from."""
        return self._revisions[role]

    def owner(self, role: Role) -> Owner:
        """A role's pool.

        Raises:
            SubstrateError: it is not there.
        """
        if role not in self._plan.owners:
            raise SubstrateError(f"the {role} pool of {self._plan.service.name} is not there")
        return self._plan.owners[role]

    def pool(self, pod: Pod) -> Role:
        """The role of the pool that controls a pod."""
        return self._pools[pod.owner]

    def all(self) -> dict[str, Pod]:
        """All that there are, by name and in the order of names."""
        metadata = self._plan.service.metadata
        documents = self._cache.of(metadata.namespace, metadata.name)
        read = {str(document["metadata"]["name"]): self._pod(document) for document in documents}
        self._read = read
        return {name: pod for name, pod in read.items() if pod.owner in self._pools and _is_known(pod)}

    def leaving(self) -> list[tuple[Pod, Role]]:
        """Pods of the service that no pool of its controls, and that end; each with the role whose accelerators it has.

        Their pool was deleted, or the whole service before this one of the same name. Kubernetes ends them, and no step
        is for them, but until they are gone they hold what they have. They are those that `all` saw last.
        """
        strangers = (pod for pod in self._read.values() if pod.owner not in self._pools and _is_known(pod))
        found = ((pod, self._doomed(pod)) for pod in strangers)
        return [(pod, role) for pod, role in found if role is not None]

    def _doomed(self, pod: Pod) -> Role | None:
        controller = controller_of(pod.document) or {}
        kind, name = str(controller.get("kind")), str(controller.get("name"))
        # One whose pool has another uid by now will be deleted, if it is not yet.
        if pod.deleted_by is None and (kind, name) not in self._names:
            return None
        return _ROLE_OF.get(kind) or (None if pod.is_slot else Role(pod.label))

    def now(self, pod: Pod) -> Pod | None:
        """The same pod, not another of its name, as it is now."""
        found = self.all().get(pod.name)
        return found if found is not None and found.uid == pod.uid else None

    def notice(self) -> None:
        """Wake those who wait for news of pods."""
        self._news.set()
        self._news = asyncio.Event()

    async def create(self, role: Role, *, slot: bool) -> Pod:
        """Make a pod of a name that is free.

        If it stays unknown whether one was made, the next call asks for the same one, so that there are never two.

        Raises:
            SubstrateError: the API server did not make it, or its pool is not there.
        """
        owner, plan = self.owner(role), self._plan
        unsure = self._unsure.pop((role, slot), None)
        for _ in range(_TRIES):
            name = unsure or f"{self.prefix}{self._suffix()}"
            body = engine_pod(plan.service, plan.config, name=name, pool=role, slot=slot, owner=owner)
            try:
                document = await self._created(body, owner, again=name == unsure)
            except UnreachableError as error:
                self._unsure[role, slot] = name
                raise SubstrateError(f"it is not known whether a pod was made: {error}") from error
            except KubeError as error:
                raise SubstrateError(f"no pod was made: {error}") from error
            unsure = None
            if document is not None:
                self._cache.put(document)
                return read_pod(document)
        raise SubstrateError(f"no pod was made: {_TRIES} names that begin with {self.prefix} are taken")

    async def _created(self, body: Document, owner: Owner, *, again: bool) -> Document | None:
        """The pod; None if its name is taken, unless it is what an earlier call made without an answer."""
        namespace, name = key_of(body)
        try:
            return await self._api.create(body)
        except AlreadyExistsError:
            if not again or self._cache.get(namespace, name) is not None:
                return None
        found = await self._api.get(PODS, namespace=namespace, name=name)
        return found if is_controlled_by(found, owner.uid) else None

    async def change(self, pod: Pod, change: Change) -> Pod:
        """Change a pod's metadata, whoever else writes it meanwhile; the pod as it is then.

        Raises:
            PodGoneError: it was deleted.
            SubstrateError: the API server did not do it.
        """
        try:
            return await self._change(pod, change)
        except KubeError as error:
            raise SubstrateError(f"pod {pod.name} was not changed: {error}") from error

    async def change_at_last(self, pod: Pod, change: Change) -> Pod:
        """The same for what has happened already and must not be lost: tried until it is written.

        Raises:
            PodGoneError: it was deleted.
            SubstrateError: the API server will never do it.
        """
        try:
            return await _UNTIL_DONE(self._change, pod, change)
        except KubeError as error:
            raise SubstrateError(f"pod {pod.name} was not changed: {error}") from error

    async def end(self, pod: Pod, *, grace_seconds: float, timeout_seconds: float) -> None:
        """Delete a pod and wait until it is gone; its accelerators are held until then.

        Raises:
            SubstrateError: the API server did not do it, or the kubelet takes too long.
        """
        namespace = self._plan.service.metadata.namespace
        try:
            await self._api.delete(
                PODS, namespace=namespace, name=pod.name, uid=pod.uid, grace_seconds=max(1, round(grace_seconds))
            )
            async with asyncio.timeout(grace_seconds + timeout_seconds):
                while self.now(pod) is not None:
                    await self._news_of(pod)
        except TimeoutError:
            node = (pod.document.get("spec") or {}).get("nodeName", "its node")
            raise SubstrateError(f"pod {pod.name} is still ending; {node} may not answer") from None
        except KubeError as error:
            raise SubstrateError(f"pod {pod.name} was not deleted: {error}") from error

    async def _change(self, pod: Pod, change: Change) -> Pod:
        for _ in range(_TRIES):
            now = self.now(pod)
            if now is None:
                raise PodGoneError(f"pod {pod.name} is gone")
            body = change(now)
            if body is None:
                return now
            namespace = self._plan.service.metadata.namespace
            try:
                document = await self._api.patch(PODS, namespace=namespace, name=pod.name, body=body)
            except NotFoundError:
                self._cache.remove(now.document)
                continue
            except ConflictError:
                await self._look(now)
                continue
            self._cache.put(document)
            return read_pod(document)
        raise ConflictError(f"others changed it {_TRIES} times in between")

    async def _news_of(self, pod: Pod) -> None:
        """Wait for news of any pod; without any for some time, ask for this one."""
        news = self._news
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await news.wait()
        except TimeoutError:
            await self._look(pod)

    async def _look(self, pod: Pod) -> None:
        """Bring the cache up to date about one pod."""
        namespace = self._plan.service.metadata.namespace
        try:
            document = await self._api.get(PODS, namespace=namespace, name=pod.name)
        except NotFoundError:
            self._cache.remove(pod.document)
            return
        if document["metadata"].get("uid") != pod.uid:
            self._cache.remove(pod.document)
        self._cache.put(document)

    def _pod(self, document: Mapping[str, Any]) -> Pod:
        before = self._read.get(str(document["metadata"]["name"]))
        return before if before is not None and before.document is document else read_pod(document)


def _is_known(pod: Pod) -> bool:
    return pod.is_slot or pod.label in _ROLES


def _may_pass(error: Exception) -> bool:
    return isinstance(error, KubeError) and not isinstance(error, NotLeadingError | ForbiddenError | InvalidError)


_UNTIL_DONE = stamina.AsyncRetryingCaller(attempts=None, timeout=None, wait_max=5.0).on(_may_pass)
