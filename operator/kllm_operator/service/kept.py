"""What is kept, be it a service or a standalone pool: an object, the verdict on its spec, and the fleet made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kllm_core.kinds.service import InferenceService
from kllm_core.labels import PAUSED
from kllm_operator.kube.cache import Key
from kllm_operator.kube.exceptions import KubeError, NotLeadingError
from kllm_operator.loop.report import Report
from kllm_operator.service.children import trouble_of
from kllm_operator.service.cluster import Cluster
from kllm_operator.service.facts import Facts, Trouble, Verdict
from kllm_operator.service.fleet import Fleet
from kllm_operator.service.pools import Pools
from kllm_operator.service.standalone import PoolKey
from kllm_operator.service.telling import Teller
from kllm_operator.service.writer import StatusWriter

RESYNC_SECONDS = 600.0
"""Between two looks at something of which nothing was heard: for what no event tells."""
TOKEN_SECONDS = 30.0
"""Between two looks at the fleet token while nothing has it: no event tells that it was deleted, or is another one."""


class Kept(ABC):
    """One of them, by its uid: one that is made anew under the same name gets a runtime of its own.

    Reconciles of one runtime do not overlap, and `close` comes after the last one.

    Args:
        cluster: where it is.
        document: its object.
        pools: its pools, or the pool that it is.
        status: writes its status.
    """

    def __init__(self, cluster: Cluster, document: Mapping[str, Any], *, pools: Pools, status: StatusWriter) -> None:
        self.uid = str(document["metadata"]["uid"])
        self._cluster, self._document = cluster, document
        self._pools, self._status = pools, status
        self._teller = Teller(cluster, lambda: self._document)
        self._service: InferenceService | None = None
        self._verdict = Verdict()
        self._trouble: Trouble | None = None
        self._report: Report | None = None
        self._fleet: Fleet | None = None
        self._failing = False
        self._token: str | None = None

    @property
    def ticking_seconds(self) -> float:
        """For how long the present tick of its loop lasts; 0 without any."""
        return 0.0 if self._fleet is None else self._fleet.ticking_seconds

    def halt(self) -> None:
        """Take no more steps: it is being deleted, and what goes is not to be replaced."""
        if self._fleet is not None:
            self._fleet.halt()

    async def close(self) -> None:
        """Leave it as it is."""
        if self._fleet is not None:
            await self._fleet.close()
            self._fleet = None

    @property
    def _paused(self) -> bool:
        return (self._document["metadata"].get("annotations") or {}).get(PAUSED) == "true"

    def _conclude(self, verdict: Verdict) -> None:
        """Keep the verdict on the spec; a new refusal is told."""
        if verdict != self._verdict and not verdict.accepted:
            self._cluster.recorder.tell(
                self._document, reason=verdict.reason, note=verdict.message, action="Accept", warning=True
            )
        self._verdict = verdict

    async def _attempt(self, work: Callable[[InferenceService], Awaitable[None]]) -> KubeError | None:
        """Do what follows from the accepted spec, if there is one; what could not be written, for the status to say.

        Raises:
            NotLeadingError: it is for another replica to do.
        """
        self._trouble = None
        if self._service is None:
            return None
        try:
            await work(self._service)
        except KubeError as error:
            self._trouble = trouble_of(error)
            if isinstance(error, NotLeadingError):
                raise
            return error
        return None

    async def _use_token(self, token: str | None) -> None:
        """Speak to engines with this fleet token; a fleet that has another one is left."""
        if token is not None and token != self._token:
            self._token = token
            await self.close()

    def _keep_fleet(self, service: InferenceService) -> None:
        """Have a fleet by this spec, once there is a token."""
        if self._fleet is not None:
            self._fleet.change(service, paused=self._paused)
        elif self._token is not None:
            self._fleet = Fleet(
                self._cluster, service, self._pools, token=self._token, tell=self._teller.tell,
                publish=self._published, paused=self._paused,
            )  # fmt: skip

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

    @abstractmethod
    def _published(self, report: Report) -> None:
        """Take what the loop saw and decided."""

    def _want_if_news(self, key: Key | PoolKey, live: Mapping[str, Any] | None) -> None:
        """Ask for a reconcile if the status of the object has something to tell."""
        # What has failed comes again by itself, after a pause that ticks are not to shorten.
        if live is not None and not self._failing and self._status.differs(self._facts(), live):
            self._cluster.want(key)
