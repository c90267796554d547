"""What the other routers have told lately, added up by instance and by key. Pure: the clock is the caller's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kllm_router.scheduling.expected import Mark
from kllm_router.scheduling.quota import NOTHING, Spent
from kllm_router.scheduling.share import NO_SHARE, Share, summed
from kllm_router.shared.told import Told

_MOST_LEFT = 256
"""Routers that have left, of whom is still known what they told last."""

OnHome = Callable[[str, Sequence[Mark], float], None]
"""Told that another router has given prompts with these marks to an instance, and when that was heard."""


@dataclass
class _Peer:
    told: Told
    heard_at: float


class Peers:
    """The other routers of a service.

    Args:
        forget_seconds: what a router told counts for so long unless it tells anew. Only what its keys have spent counts
            until their minute has passed, or a router that is started anew would give it to them again.
        on_home: told where the others' prompts went.
    """

    def __init__(self, forget_seconds: float, on_home: OnHome = lambda _id, _marks, _now: None) -> None:
        self._forget_seconds = forget_seconds
        self._on_home = on_home
        self._peers: dict[str, _Peer] = {}
        self._left: OrderedDict[str, _Peer] = OrderedDict()
        self._total: dict[str, Share] = {}
        self._until = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def hear(self, name: str, told: Told, now: float) -> None:
        """A router has told this, unless it is what it had told before. Counts from the next `settle` on."""
        known = self._peers.get(name) or self._left.get(name)
        if known is None or known.told.sequence != told.sequence:
            self._peers[name] = _Peer(told, now)
            self._left.pop(name, None)
            for instance_id, marks in told.homes.items():
                self._on_home(instance_id, marks, now)

    def forget(self, name: str) -> None:
        """A router has taken back what it told."""
        if name in self._peers:
            self._leave(name)

    def settle(self, now: float) -> None:
        """Add up what is told, without those that have been silent for too long."""
        oldest = now - self._forget_seconds
        for name in [name for name, peer in self._peers.items() if peer.heard_at < oldest]:
            self._leave(name)
        self._total = summed(peer.told.shares for peer in self._peers.values())
        latest = max((peer.heard_at for peer in self._peers.values()), default=oldest)
        self._until = latest + self._forget_seconds

    def of(self, instance_id: str, now: float) -> Share:
        """What all of them have on an instance. Nothing when nobody was heard for too long, settled or not."""
        return self._total.get(instance_id, NO_SHARE) if now <= self._until else NO_SHARE

    def spent(self, key: str, now: float) -> Spent:
        """What a key has taken at all of them."""
        total = NOTHING
        for peer in self._peers.values():
            told = peer.told.spent.get(key, NOTHING)
            age = now - peer.heard_at
            total = total.plus(told if age <= self._forget_seconds else told.aged(age))
        for peer in self._left.values():
            total = total.plus(peer.told.spent.get(key, NOTHING).aged(now - peer.heard_at))
        return total

    def _leave(self, name: str) -> None:
        self._left[name] = self._peers.pop(name)
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
