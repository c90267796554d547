"""What the other routers have told lately, added up by instance. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from kllm_router.scheduling.share import NO_SHARE, Share, summed
from kllm_router.shared.told import Told


@dataclass
class _Peer:
    told: Told
    heard_at: float


class Peers:
    """The other routers of a service.

    Args:
        forget_seconds: what a router told counts for so long unless it tells anew.
    """

    def __init__(self, forget_seconds: float) -> None:
        self._forget_seconds = forget_seconds
        self._peers: dict[str, _Peer] = {}
        self._total: dict[str, Share] = {}
        self._until = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def hear(self, name: str, told: Told, now: float) -> None:
        """A router has told this, unless it is what it had told before. Counts from the next `settle` on."""
        known = self._peers.get(name)
        if known is None or known.told.sequence != told.sequence:
            self._peers[name] = _Peer(told, now)

    def forget(self, name: str) -> None:
        """A router has taken back what it told."""
        self._peers.pop(name, None)

    def settle(self, now: float) -> None:
        """Add up what is told, without those that have been silent for too long."""
        oldest = now - self._forget_seconds
        self._peers = {name: peer for name, peer in self._peers.items() if peer.heard_at >= oldest}
        self._total = summed(peer.told.shares for peer in self._peers.values())
        latest = max((peer.heard_at for peer in self._peers.values()), default=oldest)
        self._until = latest + self._forget_seconds

    def of(self, instance_id: str, now: float) -> Share:
        """What all of them have on an instance. Nothing when nobody was heard for too long, settled or not."""
        return self._total.get(instance_id, NO_SHARE) if now <= self._until else NO_SHARE
