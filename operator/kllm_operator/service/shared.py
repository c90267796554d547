"""What the standalone pools of one service share: its name, its fleet token, and who may call its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kllm_core.kinds.service import InferenceService
from kllm_core.labels import COMPONENT, COMPONENT_ENGINE, SPEC_HASH
from kllm_operator.kube.cache import Key, key_of
from kllm_operator.kube.exceptions import ConflictError
from kllm_operator.kube.resources import PODS, SERVICE_ACCOUNTS, Document
from kllm_operator.render.owner import Owner
from kllm_operator.render.standalone import account, policies, shared_token
from kllm_operator.service.children import NO_VERSION, Children, NameTakenError
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.token import ensure_token, read_token
from kllm_operator.substrate.kubernetes_pods import read_pod


class Shared:
    """Kept by each of the pools in the same way, so that it does not matter which of them comes first or goes.

    Args:
        cluster: where they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._children = Children(cluster.api, cluster.caches)

    async def ensure(self, service: InferenceService, pools: Sequence[Mapping[str, Any]]) -> str:
        """Have all but the token; uid of the account, which owns the rest.

        Args:
            service: of the pools.
            pools: all standalone pools of that service.

        Raises:
            NameTakenError: something else has the service's name, or that of one of the objects.
            KubeError: something cannot be written.
        """
        wanted = account(service, [owner_of(pool) for pool in pools])
        key = (service.metadata.namespace, service.name)
        live = self._cached(key) or await self._made(wanted)
        if not _are_owners(pools, live):
            raise NameTakenError(
                f"ServiceAccount {'/'.join(key_of(live))} is there and not of pools: delete it, or give the pools "
                "another label kllm.io/service"
            )
        if _hash_of(live) != _hash_of(wanted):
            live = self._cluster.caches.put(await self._cluster.api.apply(wanted))
        uid = str(live["metadata"]["uid"])
        documents = policies(service, self._cluster.render.network, uid=uid)
        await self._children.ensure(documents, service=key, uid=uid)
        return uid

    def find(self, service: Key, pools: Sequence[Mapping[str, Any]]) -> str | None:
        """Uid of the account if the pools are known to have it; nobody is asked. See `ensure`."""
        live = self._cached(service)
        return str(live["metadata"]["uid"]) if live is not None and _are_owners(pools, live) else None

    async def token(self, service: InferenceService, uid: str, *, make: bool) -> str | None:
        """The fleet token.

        Args:
            service: of the pools.
            uid: of the account.
            make: make it if there is none.

        Raises:
            NameTakenError: the secret of that name is another's.
            KubeError: it cannot be read or made.
        """
        find = ensure_token if make else read_token
        return await find(self._cluster.api, service, uid=uid, render=shared_token)

    def _cached(self, service: Key) -> Document | None:
        return self._cluster.caches.of(SERVICE_ACCOUNTS).get(service[0], f"{service[1]}-{COMPONENT_ENGINE}")

    async def _made(self, wanted: Mapping[str, Any]) -> Document:
        """The account, made unless it is there: too new for the cache, or somebody else's."""
        new = {**wanted, "metadata": {**wanted["metadata"], "resourceVersion": NO_VERSION}}
        try:
            return self._cluster.caches.put(await self._cluster.api.apply(new))
        except ConflictError:
            namespace, name = key_of(wanted)
            return await self._cluster.api.get(SERVICE_ACCOUNTS, namespace=namespace, name=name)


def token_is_held(cluster: Cluster, service: Key, *, pool: str | None = None) -> bool:
    """Whether an engine runs, which could not be spoken to with another token.

    Args:
        cluster: where it is.
        service: namespace and name.
        pool: uid of a pool whose engines alone count; None: those of all.
    """
    for pod in cluster.caches.of(PODS).of(*service):
        if (pod["metadata"].get("labels") or {}).get(COMPONENT) == COMPONENT_ENGINE:
            engine = read_pod(pod)
            if engine.running_since is not None and pool in {None, engine.owner}:
                return True
    return False


def owner_of(pool: Mapping[str, Any]) -> Owner:
    """A pool as others name it."""
    metadata = pool["metadata"]
    return Owner(str(pool["apiVersion"]), str(pool["kind"]), str(metadata["name"]), str(metadata["uid"]))


def _are_owners(pools: Sequence[Mapping[str, Any]], live: Mapping[str, Any]) -> bool:
    """Whether one of the pools is among the owners."""
    uids = {each.get("uid") for each in live["metadata"].get("ownerReferences") or ()}
    return any(pool["metadata"]["uid"] in uids for pool in pools)


def _hash_of(document: Mapping[str, Any]) -> str:
    return str((document["metadata"].get("annotations") or {}).get(SPEC_HASH, ""))
