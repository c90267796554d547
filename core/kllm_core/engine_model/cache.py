"""The prefix cache of one engine: blocks that are in use, blocks that may be evicted, and a second tier. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Blocks of a prompt's start that are cached without a gap: in the first tier, and then in the second one."""

    device: int
    host: int

    @property
    def blocks(self) -> int:
        """Both."""
        return self.device + self.host


class PrefixCache:
    """Blocks by id, where an id stands for a block and all that precedes it.

    What no request uses is evicted, the least recently used first. A prompt's blocks are given back from its end to its
    start, so that a block always is older than those that precede it: leaves of the radix tree go first.

    Args:
        host_blocks: that the second tier keeps of what the first one evicts.
    """

    def __init__(self, *, host_blocks: int = 0) -> None:
        self._host_blocks = host_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that requests use, shared ones counted once."""
        return len(self._users)

    @property
    def evictable(self) -> int:
        """Blocks that nothing uses."""
        return len(self._idle)

    @property
    def in_host(self) -> int:
        """Blocks of the second tier."""
        return len(self._host)

    def match(self, blocks: Sequence[int]) -> Match:
        """How much of a prompt's start is cached."""
        users, idle, host = self._users, self._idle, self._host
        device = 0
        for block in blocks:
            if block not in users and block not in idle:
                break
            device += 1
        if not host or device == len(blocks):
            return Match(device, 0)
        found = device
        for block in blocks[device:]:
            if block not in host and block not in users and block not in idle:
                break
            found += 1
        return Match(device, found - device)

    def pin(self, blocks: Sequence[int]) -> int:
        """A request uses these blocks; returns how many of them are new to the first tier."""
        new = 0
        users, idle = self._users, self._idle
        for block in blocks:
            if block in users:
                users[block] += 1
                continue
            users[block] = 1
            if block in idle:
                del idle[block]
            else:
                self._host.pop(block, None)
                new += 1
        return new

    def unpin(self, blocks: Sequence[int]) -> None:
        """A request uses these blocks, a prompt's start, no more; they stay until their room is needed."""
        users = self._users
        for block in reversed(blocks):
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                self._idle[block] = None

    def evict(self, count: int) -> int:
        """Give up the least recently used blocks; returns how many there were."""
        evicted = 0
        while evicted < count and self._idle:
            block, _ = self._idle.popitem(last=False)
            evicted += 1
            if self._host_blocks:
                self._host[block] = None
                self._host.move_to_end(block)
                if len(self._host) > self._host_blocks:
                    self._host.popitem(last=False)
        return evicted

    def clear(self) -> None:
        """Forget all that nothing uses, in both tiers."""
        self._idle.clear()
        self._host.clear()
