"""Leader election on a Lease, so that one replica acts and the others are ready to."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from kllm_operator.kube.api import KubeApi
from kllm_operator.kube.exceptions import ConflictError, KubeError, NotFoundError
from kllm_operator.kube.resources import LEASES, Document

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LeaseSettings:
    """Times of the election: those that Kubernetes' own components use."""

    lease_seconds: float = 15.0
    """Silence of a leader after which another takes over, 15 s. Shorter changes leaders when the server is slow."""
    renew_seconds: float = 10.0
    """Time after the last renewal at which a leader stops, 10 s: well before another can begin."""
    retry_seconds: float = 2.0
    """Between two looks or renewals, 2 s."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_seconds < self.renew_seconds < self.lease_seconds:
            raise ValueError("0 < retry_seconds < renew_seconds < lease_seconds must hold")


class LeaseLostError(Exception):
    """This replica leads no longer; whatever it was about to do, another may do."""


class Election:
    """One candidate. The age of others' renewals is measured here, so that clocks need not agree.

    Args:
        api: not fenced.
        namespace: of the Lease.
        name: of the Lease.
        identity: of this candidate, unlike all others'.
        settings: times.
        clock: monotonic seconds; that of the event loop if left out.
        wall: the time of day, for people who read the Lease.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        settings: LeaseSettings | None = None,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._settings = settings or LeaseSettings()
        self._clock = clock or asyncio.get_running_loop().time
        self._wall = wall
        self._renewed_at: float | None = None
        self._lease: Document | None = None
        self._seen: tuple[str, float] = ("", 0.0)

    @property
    def leading(self) -> bool:
        """Whether this candidate leads for certain at this moment."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < self._settings.renew_seconds

    async def acquire(self) -> None:
        """Wait until this candidate leads."""
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_seconds):
                    if await self._try():
                        _log.info("LeaseAcquired", lease=self._name, identity=self._identity)
                        return
            except (KubeError, TimeoutError) as error:
                _log.warning("LeaseNotAcquired", lease=self._name, error=str(error) or type(error).__name__)
            await asyncio.sleep(self._settings.retry_seconds)

    async def keep(self) -> None:
        """Renew the lease for as long as that is possible.

        Raises:
            LeaseLostError: another leads, or may lead soon.
        """
        while True:
            await asyncio.sleep(self._settings.retry_seconds)
            if self._renewed_at is None:
                raise LeaseLostError("the lease was never acquired")
            left = self._renewed_at + self._settings.renew_seconds - self._clock()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    if not await self._try():
                        self._renewed_at = None
                        raise LeaseLostError(f"{self._holder() or 'another replica'} holds the lease")
            except (KubeError, TimeoutError) as error:
                _log.warning("LeaseNotRenewed", lease=self._name, error=str(error) or type(error).__name__)
                if not self.leading:
                    self._renewed_at = None
                    raise LeaseLostError(f"the lease was not renewed in {self._settings.renew_seconds:g} s") from error

    async def release(self) -> None:
        """Give the lease up, so that another need not wait. Does nothing if it cannot be given up."""
        if not self.leading:
            return
        self._renewed_at = None
        try:
            async with asyncio.timeout(self._settings.renew_seconds):
                # Read anew: an answer to the last renewal may have been lost with whoever waited for it.
                lease = await self._api.get(LEASES, namespace=self._namespace, name=self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    nobody = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._now()}
                    await self._write(lease, nobody)
        except (KubeError, TimeoutError) as error:
            _log.warning("LeaseNotReleased", lease=self._name, error=str(error) or type(error).__name__)

    async def _try(self) -> bool:
        """Take or renew the lease; whether it is this candidate's."""
        began = self._clock()
        if self.leading and self._lease is not None:
            try:
                self._lease, self._renewed_at = await self._renew(self._lease), began
            except (ConflictError, NotFoundError):
                # Somebody else has written it, or an answer to this candidate was lost: looking tells.
                self._lease = None
            else:
                return True
        try:
            found = await self._api.get(LEASES, namespace=self._namespace, name=self._name)
        except NotFoundError:
            found = None
        try:
            lease = await self._create() if found is None else await self._take(found, now=began)
        except ConflictError:
            # Another candidate was faster. If that was this one itself, whose answer was lost, the next look tells.
            return self._renewed_at is not None and self.leading
        if lease is None:
            return False
        self._lease, self._renewed_at = lease, began
        return True

    async def _create(self) -> Document:
        return await self._api.create(
            {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"namespace": self._namespace, "name": self._name},
                "spec": self._spec(transitions=0),
            }
        )

    async def _take(self, found: Document, *, now: float) -> Document | None:
        spec = found.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if holder == self._identity:
            return await self._renew(found)
        version = str(found["metadata"].get("resourceVersion"))
        if version != self._seen[0]:
            self._seen = (version, now)
            self._lease = found
        lasts = float(spec.get("leaseDurationSeconds") or self._settings.lease_seconds)
        if holder and now - self._seen[1] < lasts:
            return None
        return await self._write(found, self._spec(transitions=int(spec.get("leaseTransitions") or 0) + 1))

    async def _renew(self, lease: Document) -> Document:
        return await self._write(lease, {"renewTime": self._now(), "leaseDurationSeconds": self._duration()})

    async def _write(self, lease: Document, spec: dict[str, Any]) -> Document:
        metadata = {key: lease["metadata"][key] for key in ("uid", "resourceVersion")}
        body = {"metadata": metadata, "spec": spec}
        return await self._api.patch(LEASES, namespace=self._namespace, name=self._name, body=body)

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = self._now()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration(),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _holder(self) -> str:
        return str(((self._lease or {}).get("spec") or {}).get("holderIdentity") or "")

    def _duration(self) -> int:
        return max(1, round(self._settings.lease_seconds))

    def _now(self) -> str:
        return self._wall().astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
