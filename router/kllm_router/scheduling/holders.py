"""Sets of instances that hold a block, each with a number, so that a million blocks share a few thousand sets. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Holders(NamedTuple):
    """Instances by tier, as bits of one integer each."""

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0


NOBODY = Holders()


class HolderSets:
    """Numbers of sets that are in use. The empty set is number 0 and is always there."""

    def __init__(self) -> None:
        self._sets: list[Holders] = [NOBODY]
        self._uses: list[int] = [1]
        self._numbers: dict[Holders, int] = {NOBODY: 0}
        self._free: list[int] = []

    def __getitem__(self, number: int) -> Holders:
        return self._sets[number]

    def move(self, number: int, wanted: Holders) -> int:
        """A block goes from one set to another; returns the number of that one."""
        new = self._numbers.get(wanted)
        if new is None:
            new = self._free.pop() if self._free else len(self._sets)
            if new == len(self._sets):
                self._sets.append(wanted)
                self._uses.append(0)
            self._sets[new] = wanted
            self._numbers[wanted] = new
        self._uses[new] += bool(new)
        if number:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._numbers[self._sets[number]]
                self._sets[number] = NOBODY
                self._free.append(number)
        return new
