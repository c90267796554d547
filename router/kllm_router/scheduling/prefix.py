"""Which instance holds which KV block in which tier, and how much of a prompt each has. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_BLOCKS = 4_000_000
"""Blocks over all instances. One takes about 200 bytes, so that the bound lies near 800 MB."""


class Tier(enum.IntEnum):
    """Where a block lies, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


@dataclass(frozen=True)
class PrefixMatch:
    """Blocks of a prompt's start that one instance holds without a gap, each counted in its fastest tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.device + self.host + self.disk + self.shared


NO_MATCH = PrefixMatch()


@dataclass
class _Holder:
    """One instance in the index; its bit is free again when it leaves."""

    incarnation: int
    bit: int
    tiers: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in Tier})


class PrefixIndex:
    """Blocks by hash and tier.

    A hash stands for its whole prefix, yet an inner block can leave before those that follow it. A lookup therefore
    walks the chain from its start and keeps, as one integer, the set of instances that still have all of it: a step
    costs the same for one instance as for a hundred.

    Every change names the incarnation that it is about. One that is not the current one changes nothing, so that
    messages of a server that is gone cannot bring its blocks back.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[str, _Holder] = {}
        self._names: dict[int, str] = {}
        self._free_bits: list[int] = []
        self._masks: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._blocks = 0
        self._refused = 0

    @property
    def blocks(self) -> int:
        """Blocks in the index, counted once per instance and tier."""
        return self._blocks

    @property
    def refused(self) -> int:
        """Blocks that were left out because the index was full. They only cost credit, never correctness."""
        return self._refused

    def begin(self, instance_id: str, incarnation: int) -> None:
        """Make `incarnation` the current one; blocks of another one are forgotten."""
        holder = self._holders.get(instance_id)
        if holder is not None and holder.incarnation == incarnation:
            return
        self.forget(instance_id)
        number = self._free_bits.pop() if self._free_bits else len(self._names)
        self._holders[instance_id] = _Holder(incarnation, 1 << number)
        self._names[number] = instance_id

    def forget(self, instance_id: str) -> None:
        """The instance has left."""
        holder = self._holders.pop(instance_id, None)
        if holder is None:
            return
        self._drop_all(holder)
        number = holder.bit.bit_length() - 1
        del self._names[number]
        self._free_bits.append(number)

    def store(self, instance_id: str, incarnation: int, tier: Tier, blocks: Iterable[int]) -> None:
        """Blocks have entered a tier."""
        holder = self._current(instance_id, incarnation)
        if holder is None:
            return
        held, masks = holder.tiers[tier], self._masks[tier]
        for block in blocks:
            if block in held:
                continue
            if self._blocks >= self._max_blocks:
                self._refused += 1
                continue
            held.add(block)
            masks[block] = masks.get(block, 0) | holder.bit
            self._blocks += 1

    def remove(self, instance_id: str, incarnation: int, tier: Tier, blocks: Iterable[int]) -> None:
        """Blocks have left a tier."""
        holder = self._current(instance_id, incarnation)
        if holder is not None:
            self._drop(holder, tier, [block for block in blocks if block in holder.tiers[tier]])

    def clear(self, instance_id: str, incarnation: int) -> None:
        """The instance's cache is empty now."""
        holder = self._current(instance_id, incarnation)
        if holder is not None:
            self._drop_all(holder)

    def held(self, instance_id: str) -> int:
        """Blocks of one instance, over all tiers."""
        holder = self._holders.get(instance_id)
        return sum(len(held) for held in holder.tiers.values()) if holder else 0

    def match(self, chain: Sequence[int]) -> dict[str, PrefixMatch]:
        """How much of a prompt each instance has.

        Args:
            chain: hashes of the prompt's full blocks, from its start.

        Returns:
            Instances with at least one block; all others have none.
        """
        tiers = [tier for tier in Tier if self._masks[tier]]
        layers = [self._masks[tier] for tier in tiers]
        if not tiers:
            return {}
        tally = _Tally(tiers)
        alive = -1
        for depth, block in enumerate(chain):
            alive, parts = _split(alive, [masks.get(block, 0) for masks in layers])
            if parts != tally.parts:
                tally.change(depth, parts)
                if not alive:
                    break
        tally.change(len(chain), [0] * len(tiers))
        return {self._names[number]: PrefixMatch(*counted) for number, counted in tally.counts.items()}

    def _current(self, instance_id: str, incarnation: int) -> _Holder | None:
        holder = self._holders.get(instance_id)
        return holder if holder is not None and holder.incarnation == incarnation else None

    def _drop_all(self, holder: _Holder) -> None:
        for tier in Tier:
            self._drop(holder, tier, list(holder.tiers[tier]))

    def _drop(self, holder: _Holder, tier: Tier, blocks: Iterable[int]) -> None:
        held, masks = holder.tiers[tier], self._masks[tier]
        for block in blocks:
            if block not in held:
                continue
            held.remove(block)
            left = masks[block] & ~holder.bit
            if left:
                masks[block] = left
            else:
                del masks[block]
            self._blocks -= 1


def _split(alive: int, masks: list[int]) -> tuple[int, list[int]]:
    """Those of `alive` that hold a block, altogether and by their fastest tier."""
    parts: list[int] = []
    found = 0
    for mask in masks:
        part = mask & alive & ~found
        parts.append(part)
        found |= part
    return found, parts


class _Tally:
    """Blocks by instance and tier, counted where an instance enters or leaves a tier rather than at each block."""

    def __init__(self, tiers: list[Tier]) -> None:
        self.parts = [0] * len(tiers)
        self.counts: dict[int, list[int]] = {}
        self._tiers = tiers
        self._since: dict[tuple[Tier, int], int] = {}

    def change(self, depth: int, parts: list[int]) -> None:
        """From this depth on, the instances in each tier are these."""
        for tier, before, after in zip(self._tiers, self.parts, parts, strict=True):
            for number in _bits(after & ~before):
                self._since[tier, number] = depth
            for number in _bits(before & ~after):
                counted = self.counts.setdefault(number, [0] * len(Tier))
                counted[tier] += depth - self._since[tier, number]
        self.parts = parts


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
