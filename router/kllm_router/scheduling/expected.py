"""Prefixes that instances will have: prompts with them were sent there, and are in no cache stream yet. Pure.

Of each prompt only a few depths are kept, each with the hash of the block there, which stands for all before it. What
is found is therefore a lower bound, and never wrong about which prompt it was. The same marks tell how much used a
prefix is.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

MAX_MARKS = 65_536
_TTL_SECONDS = 60.0
_HEAT_SECONDS = 60.0

Mark = tuple[int, int]
"""Blocks from a prompt's start, and the hash of the last of them."""
Chain = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.uint64]]


def marks(chain: Chain) -> tuple[Mark, ...]:
    """Those of one prompt: depths 1, 2, 3, 4, 6, 8, 12 and so on, and its end."""
    depths = [*_depths(len(chain) - 1), len(chain)] if len(chain) else []
    return tuple((depth, int(chain[depth - 1])) for depth in depths)


def _depths(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        if power > 1 and power * 3 // 2 <= most:
            yield power * 3 // 2
        power *= 2


class ExpectedPrefixes:
    """Marks by hash and instance. `now` is monotonic seconds and never goes back.

    Args:
        ttl_seconds: after which a prompt that was sent is no reason to expect anything.
        max_marks: beyond which the oldest are forgotten.
    """

    def __init__(self, *, ttl_seconds: float = _TTL_SECONDS, max_marks: int = MAX_MARKS) -> None:
        self._ttl, self._max = ttl_seconds, max_marks
        self._marks: OrderedDict[tuple[int, int, str], float] = OrderedDict()
        self._holders: dict[int, dict[str, None]] = {}
        self._depths: Counter[int] = Counter()
        self._heat: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def note(self, instance_id: str, prompt: Sequence[Mark], now: float) -> None:
        """A prompt with these marks was sent to an instance."""
        until = now + self._ttl
        for depth, block in prompt:
            key = (depth, block, instance_id)
            self._heat[block] = self._heat_of(block, now) + 1.0, now
            if key not in self._marks:
                self._depths[depth] += 1
                self._holders.setdefault(block, {})[instance_id] = None
            self._marks[key] = until
            self._marks.move_to_end(key)
        while self._marks and (len(self._marks) > self._max or next(iter(self._marks.values())) <= now):
            self._drop(next(iter(self._marks)))

    def match(self, chain: Chain, now: float) -> dict[str, int]:
        """Blocks of a prompt's start that each instance should have at least."""
        found: dict[str, int] = {}
        for depth in sorted((each for each in self._depths if each <= len(chain)), reverse=True):
            block = int(chain[depth - 1])
            for instance_id in self._holders.get(block, ()):
                if instance_id not in found and self._marks.get((depth, block, instance_id), 0.0) > now:
                    found[instance_id] = depth
        return found

    def keep_until(self, instance_id: str, prompt: Sequence[Mark], until: float) -> None:
        """A prompt with these marks is expected there no longer, or for longer, than was said."""
        for depth, block in prompt:
            key = (depth, block, instance_id)
            if key in self._marks:
                self._marks[key] = until

    def heat(self, chain: Chain, depth: int, now: float) -> float:
        """Prompts of about the last minute that begin with the first blocks of this one, down to about that depth."""
        deepest = max((each for each in self._depths if each <= min(depth, len(chain))), default=0)
        return self._heat_of(int(chain[deepest - 1]), now) if deepest else 0.0

    def _heat_of(self, block: int, now: float) -> float:
        heat, at = self._heat.get(block, (0.0, now))
        return heat * math.exp(-(now - at) / _HEAT_SECONDS)

    def forget(self, instance_id: str) -> None:
        """The instance has left, or its cache is gone."""
        for key in [key for key in self._marks if key[2] == instance_id]:
            self._drop(key)

    def _drop(self, key: tuple[int, int, str]) -> None:
        depth, block, instance_id = key
        del self._marks[key]
        self._depths[depth] -= 1
        if not self._depths[depth]:
            del self._depths[depth]
        holders = self._holders[block]
        del holders[instance_id]
        if not holders:
            del self._holders[block], self._heat[block]
