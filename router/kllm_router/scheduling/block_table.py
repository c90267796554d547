"""A table of 64-bit block hashes with a small number for each: it is small, and thousands are looked up at once. Pure.

Extendible hashing: pages of open addressing, found by the first bits of a hash. A full page is split in two, so that
no step ever moves more than one page.
"""

from __future__ import annotations

import numpy as np

_SLOT_BITS = 10
SLOTS = 1 << _SLOT_BITS
"""Of one page."""
_FULL = SLOTS // 2
_MOST_BITS = 18
"""Bits that tell pages apart. Hashes that agree in more of them are left out once their page is full."""
_BITS = 64
_FEW = 24
"""Hashes that are faster looked up one by one than together."""

Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
Numbers = np.ndarray[tuple[int], np.dtype[np.uint32]]


class BlockTable:
    """Hash to number. Number 0 is that of all hashes which have none.

    Args:
        max_blocks: that it must be able to hold; memory is taken as it fills.
    """

    def __init__(self, max_blocks: int) -> None:
        # A page that was just split is half as full; address space that is never touched costs nothing.
        self._most_pages = 4 + 4 * max_blocks // _FULL
        self._hashes = np.zeros(self._most_pages * SLOTS, np.uint64)
        self._numbers = np.zeros(self._most_pages * SLOTS, np.uint32)
        # Single items of a view are read and written several times as fast as those of an array.
        self._hash_at, self._number_at = self._hashes.data, self._numbers.data
        self._bits = 0
        self._directory = np.zeros(1, np.int64)
        self._page_of = [0]
        self._page_bits = [0]
        self._filled = [0]
        # Hash 0 marks a free slot, so that its own number is kept here.
        self._number_of_zero = 0

    def get(self, block: int) -> int:
        """Number of one hash."""
        if not block:
            return self._number_of_zero
        slot, found = self._slot(block)
        return self._number_at[slot] if found else 0

    def get_many(self, blocks: Hashes) -> Numbers:
        """Numbers of many hashes, in their order."""
        if self._bits:
            bases = self._directory.take((blocks >> np.uint64(_BITS - self._bits)).view(np.int64)) << _SLOT_BITS
        else:
            bases = np.zeros(len(blocks), np.int64)
        offsets = (blocks & np.uint64(SLOTS - 1)).view(np.int64)
        slots = bases + offsets
        there = self._hashes.take(slots)
        same = there == blocks
        numbers: Numbers = self._numbers.take(slots) * same
        left = np.flatnonzero(~same & (there != 0))
        while len(left) > _FEW:
            offsets[left] = (offsets[left] + 1) & (SLOTS - 1)
            slots = bases[left] + offsets[left]
            there, wanted = self._hashes[slots], blocks[left]
            same = there == wanted
            numbers[left[same]] = self._numbers[slots[same]]
            left = left[~same & (there != 0)]
        for place in left.tolist():
            numbers[place] = self.get(int(blocks[place]))
        if self._number_of_zero:
            numbers[blocks == 0] = self._number_of_zero
        return numbers

    def reserve(self, block: int) -> bool:
        """Give a hash a place, whose number is 0 until it is set; False: there is no room."""
        if not block:
            return True
        slot, found = self._slot(block)
        if found:
            return True
        while self._filled[slot >> _SLOT_BITS] >= _FULL:
            if not self._make_room(slot >> _SLOT_BITS, block):
                return False
            slot, _ = self._slot(block)
        self._hash_at[slot], self._number_at[slot] = block, 0
        self._filled[slot >> _SLOT_BITS] += 1
        return True

    def set(self, block: int, number: int) -> None:
        """Give a hash that has a place another number; with 0 its place may be taken away."""
        if not block:
            self._number_of_zero = number
            return
        slot, found = self._slot(block)
        if not found:
            raise KeyError(block)
        self._number_at[slot] = number

    def _slot(self, block: int) -> tuple[int, bool]:
        """Where a hash is, or would be."""
        base = self._page_of[block >> (_BITS - self._bits)] << _SLOT_BITS
        offset, hash_at = block & (SLOTS - 1), self._hash_at
        while True:
            there = hash_at[base + offset]
            if there == block:
                return base + offset, True
            if not there:
                return base + offset, False
            offset = (offset + 1) & (SLOTS - 1)

    def _make_room(self, page: int, block: int) -> bool:
        """Sweep out hashes without a number, and split the page if that is not enough."""
        begin = page << _SLOT_BITS
        hashes, numbers = self._hashes[begin : begin + SLOTS].copy(), self._numbers[begin : begin + SLOTS].copy()
        kept = (hashes != 0) & (numbers != 0)
        hashes, numbers = hashes[kept], numbers[kept]
        if len(hashes) > _FULL * 3 // 4 and not self._split(page, block) and len(hashes) >= _FULL:
            return False
        self._hashes[begin : begin + SLOTS] = 0
        self._filled[page] = 0
        for each, number in zip(hashes.tolist(), numbers.tolist(), strict=True):
            slot, _ = self._slot(each)
            self._hash_at[slot], self._number_at[slot] = each, number
            self._filled[slot >> _SLOT_BITS] += 1
        return True

    def _split(self, page: int, block: int) -> bool:
        """Give half of a page's place in the directory to a new one, if there is one left."""
        bits, new = self._page_bits[page], len(self._filled)
        if bits >= _MOST_BITS or new >= self._most_pages:
            return False
        if bits == self._bits:
            self._bits += 1
            self._directory = np.repeat(self._directory, 2)
        span = 1 << (self._bits - bits)
        first = (block >> (_BITS - self._bits)) // span * span
        self._directory[first + span // 2 : first + span] = new
        self._page_of = self._directory.tolist()
        self._page_bits[page] = bits + 1
        self._page_bits.append(bits + 1)
        self._filled.append(0)
        return True
