"""The pools of a service, which hold what outlives a leader: counts in `spec.replicas`, stopped rollouts in the status.

Counts are there for anybody to read and, if asked to, to write.
"""

from __future__ import annotations

from collections.abc import Mapping

from kllm_core.conditions import ConditionType, Reason
from kllm_core.kinds.status import ConditionStatus
from kllm_core.objectives import Role
from kllm_core.steps import DesiredCounts
from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.caches import Caches
from kllm_operator.kube.exceptions import KubeError
from kllm_operator.kube.ownership import is_controlled_by
from kllm_operator.kube.resources import DECODE_POOLS, PREFILL_POOLS, Document
from kllm_operator.loop.counts import CountsError
from kllm_operator.loop.crashes import StoppedRollout

POOLS = {Role.PREFILL: PREFILL_POOLS, Role.DECODE: DECODE_POOLS}
"""The kind of each role's pool."""


class Pools:
    """The two pools of one service. Implements `kllm_operator.loop.counts.Counts`.

    Args:
        api: fenced.
        caches: of the pools' kinds.
        namespace: of the service.
        name: of the service.
        uid: of the service; pools of others are none of its.
    """

    def __init__(self, api: KubeApi, caches: Caches, *, namespace: str, name: str, uid: str) -> None:
        self._api, self._caches = api, caches
        self._namespace, self._name, self._uid = namespace, name, uid

    def of(self, role: Role) -> Document | None:
        """The pool of a role; None as long as there is none."""
        pool = self._caches.of(POOLS[role]).get(self._namespace, f"{self._name}-{role}")
        return pool if pool is not None and is_controlled_by(pool, self._uid) else None

    def read(self) -> Mapping[Role, int] | None:
        """See `Counts.read`."""
        counts = {}
        for role in Role:
            pool = self.of(role)
            if pool is not None and isinstance(pool["spec"].get("replicas"), int):
                counts[role] = pool["spec"]["replicas"]
        return counts or None

    def stopped(self, *, paused: bool) -> Mapping[Role, StoppedRollout]:
        """Rollouts that the pools' status calls stopped.

        Args:
            paused: whether the service is. One that the status calls paused and that is so no more was seen to by
                whoever ended the pause: nothing counts as stopped then.
        """
        stopped = {}
        for role in Role:
            status = (self.of(role) or {}).get("status") or {}
            told = {each["type"]: each for each in status.get("conditions") or ()}
            progressing = told.get(ConditionType.PROGRESSING) or {}
            resumed = (told.get(ConditionType.PAUSED) or {}).get("status") == ConditionStatus.TRUE and not paused
            if progressing.get("reason") == Reason.ROLLOUT_STOPPED and status.get("revision") and not resumed:
                stopped[role] = StoppedRollout(status["revision"], progressing["message"])
        return stopped

    async def write(self, desired: DesiredCounts) -> None:
        """See `Counts.write`."""
        counts = self.read() or {}
        for role in Role:
            if counts.get(role) != desired.of(role):
                await self._write(role, desired.of(role))

    async def _write(self, role: Role, count: int) -> None:
        pool = self.of(role)
        if pool is None:
            raise CountsError(f"there is no {POOLS[role].kind} {self._namespace}/{self._name}-{role} yet")
        metadata = pool["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "spec": {"replicas": count}}
        try:
            answer = await self._api.patch(POOLS[role], namespace=self._namespace, name=metadata["name"], body=body)
        except KubeError as error:
            raise CountsError(f"replicas of {POOLS[role].kind} {metadata['name']} not written: {error}") from error
        self._caches.put(answer)
