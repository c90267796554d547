"""Which instance holds which KV block in which tier, and how much of a prompt each has. Pure."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kllm_router.scheduling.block_table import BlockTable, Hashes
from kllm_router.scheduling.holders import Holders, HolderSets

MAX_BLOCKS = 4_000_000
"""Blocks over all instances, each counted once per instance and tier. With 2 million of them over 1,000 instances the
index takes about 70 MB (bench/router/prefix_index.py)."""


class Tier(enum.IntEnum):
    """Where a block lies, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


class PrefixMatch(NamedTuple):
    """Blocks of a prompt's start that one instance holds without a gap, each counted in its fastest tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.device + self.host + self.disk + self.shared

    def with_expected(self, blocks: int) -> PrefixMatch:
        """The same, with what is on its way there: so many blocks will be on the device by then."""
        return self if blocks <= self.blocks else self._replace(device=self.device + blocks - self.blocks)


@dataclass(frozen=True)
class TierCredit:
    """How much of a cached token's computation is saved, by tier: host and disk blocks must be loaded first."""

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25
    shared: float = 0.25

    def blocks(self, match: PrefixMatch) -> float:
        """Blocks that need not be computed."""
        return self.device * match.device + self.host * match.host + self.disk * match.disk + self.shared * match.shared

    def of(self, tier: Tier) -> float:
        """That of one tier."""
        return (self.device, self.host, self.disk, self.shared)[tier]

    def replaced(self, tier: Tier, credit: float) -> TierCredit:
        """The same with another one for a tier."""
        return replace(self, **{tier.name.lower(): credit})


NO_MATCH = PrefixMatch()
ASSUMED_CREDIT = TierCredit()
"""Before anything was measured."""
_SPARE_LOG = 256
_FEW_BITS = 16
_FIRST_LOOK = 512
"""Blocks that are looked up at first; each further look takes twice as many, as long as somebody has all so far."""


@dataclass
class _Instance:
    """One instance in the index; its bit is free again when it leaves.

    Attributes:
        held: blocks by tier.
        log: hashes that were stored, for when all of them are to go; some may have left, and some be there twice.
    """

    incarnation: int
    bit: int
    held: list[int] = field(default_factory=lambda: [0] * len(Tier))
    log: array[int] = field(default_factory=lambda: array("Q"))


class PrefixIndex:
    """Blocks by hash and tier.

    A hash stands for its whole prefix, yet an inner block can leave before those that follow it. A lookup therefore
    goes along the whole chain. All its hashes are looked up at once, and each gives the number of the set of instances
    that hold it; work in Python is done only where that set changes.

    Every change names the incarnation that it is about. One that is not the current one changes nothing, so that
    messages of a server that is gone cannot bring its blocks back.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._instances: dict[str, _Instance] = {}
        self._names: dict[int, str] = {}
        self._free_bits: list[int] = []
        self._table = BlockTable(max_blocks)
        self._sets = HolderSets()
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
        known = self._instances.get(instance_id)
        if known is not None and known.incarnation == incarnation:
            return
        self.forget(instance_id)
        number = self._free_bits.pop() if self._free_bits else len(self._names)
        self._instances[instance_id] = _Instance(incarnation, 1 << number)
        self._names[number] = instance_id

    def forget(self, instance_id: str) -> None:
        """The instance has left."""
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        self._drop_all(instance)
        number = instance.bit.bit_length() - 1
        del self._names[number]
        self._free_bits.append(number)

    def store(self, instance_id: str, incarnation: int, tier: Tier, blocks: Iterable[int]) -> None:
        """Blocks have entered a tier."""
        instance = self._current(instance_id, incarnation)
        if instance is None:
            return
        table, sets, bit = self._table, self._sets, instance.bit
        for block in blocks:
            number = table.get(block)
            holders = sets[number]
            if holders[tier] & bit:
                continue
            if self._blocks >= self._max_blocks or not self._has_place(block, number):
                self._refused += 1
                continue
            table.set(block, sets.move(number, _changed(holders, tier, holders[tier] | bit)))
            instance.log.append(block)
            instance.held[tier] += 1
            self._blocks += 1
        if len(instance.log) > 2 * sum(instance.held) + _SPARE_LOG:
            held = {block for block in instance.log if any(mask & bit for mask in sets[table.get(block)])}
            instance.log = array("Q", held)

    def remove(self, instance_id: str, incarnation: int, tier: Tier, blocks: Iterable[int]) -> None:
        """Blocks have left a tier."""
        instance = self._current(instance_id, incarnation)
        if instance is not None:
            self._drop(instance, tier, blocks)

    def clear(self, instance_id: str, incarnation: int) -> None:
        """The instance's cache is empty now."""
        instance = self._current(instance_id, incarnation)
        if instance is not None:
            self._drop_all(instance)

    def held(self, instance_id: str) -> int:
        """Blocks of one instance, over all tiers."""
        instance = self._instances.get(instance_id)
        return sum(instance.held) if instance else 0

    def match(self, chain: Sequence[int] | Hashes) -> dict[str, PrefixMatch]:
        """How much of a prompt each instance has.

        Args:
            chain: hashes of the prompt's full blocks, from its start.

        Returns:
            Instances with at least one block; all others have none.
        """
        if not self._blocks or not len(chain):
            return {}
        hashes, tally = np.asarray(chain, np.uint64), _Tally()
        begin, size = 0, _FIRST_LOOK
        while begin < len(hashes) and self._follow(tally, hashes[begin : begin + size]):
            begin, size = begin + size, 2 * size
        tally.stop()
        found: dict[str, PrefixMatch] = {}
        for mask, match in tally.ended:
            found.update(dict.fromkeys(map(self._names.__getitem__, _bits(mask)), match))
        return found

    def _follow(self, tally: _Tally, hashes: Hashes) -> bool:
        """Go along a part of a chain; whether anybody has all so far."""
        numbers = self._table.get_many(hashes)
        changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        depth = 0
        for end, number in zip([*changes.tolist(), len(numbers)], numbers[[0, *changes]].tolist(), strict=True):
            if not tally.go_on(self._sets[number], end - depth):
                return False
            depth = end
        return True

    def _current(self, instance_id: str, incarnation: int) -> _Instance | None:
        instance = self._instances.get(instance_id)
        return instance if instance is not None and instance.incarnation == incarnation else None

    def _has_place(self, block: int, number: int) -> bool:
        """Whether the table can hold a block that has this number now."""
        return bool(number) or self._table.reserve(block)

    def _drop_all(self, instance: _Instance) -> None:
        for tier in Tier:
            if instance.held[tier]:
                self._drop(instance, tier, instance.log)
        instance.log = array("Q")

    def _drop(self, instance: _Instance, tier: Tier, blocks: Iterable[int]) -> None:
        table, sets, bit = self._table, self._sets, instance.bit
        for block in blocks:
            number = table.get(block)
            holders = sets[number]
            if not holders[tier] & bit:
                continue
            table.set(block, sets.move(number, _changed(holders, tier, holders[tier] & ~bit)))
            instance.held[tier] -= 1
            self._blocks -= 1


def _changed(holders: Holders, tier: Tier, mask: int) -> Holders:
    return Holders._make((*holders[:tier], mask, *holders[tier + 1 :]))


class _Tally:
    """Groups of instances that have the same so far.

    Attributes:
        ended: groups whose prefix has come to its end, as bits, with what they have.
    """

    def __init__(self) -> None:
        self.ended: list[tuple[int, PrefixMatch]] = []
        self._groups: list[tuple[int, PrefixMatch]] = []
        self._has_begun = False

    def go_on(self, holders: Holders, blocks: int) -> bool:
        """So many further blocks are held by these; whether anybody has all so far."""
        if not self._has_begun:
            self._has_begun = True
            everybody = holders.device | holders.host | holders.disk | holders.shared
            self._groups = [(everybody, NO_MATCH)] if everybody else []
        following: dict[PrefixMatch, int] = {}
        for mask, found in self._groups:
            left = mask
            for tier, held in enumerate(holders):
                part = left & held
                if part:
                    more = PrefixMatch._make((*found[:tier], found[tier] + blocks, *found[tier + 1 :]))
                    following[more] = following.get(more, 0) | part
                    left &= ~part
                    if not left:
                        break
            if left and found.blocks:
                self.ended.append((left, found))
        self._groups = [(mask, found) for found, mask in following.items()]
        return bool(self._groups)

    def stop(self) -> None:
        """The prompt is over."""
        self.ended += self._groups
        self._groups = []


def _bits(mask: int) -> list[int]:
    """Numbers of the bits that are set."""
    if mask.bit_count() <= _FEW_BITS:
        few = []
        while mask:
            few.append((mask & -mask).bit_length() - 1)
            mask &= mask - 1
        return few
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    numbers: list[int] = np.flatnonzero(np.unpackbits(data, bitorder="little")).tolist()
    return numbers
