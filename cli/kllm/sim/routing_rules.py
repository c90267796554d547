"""Rules of other routers, to compare with: plain ones, and the formulas that other projects publish.

Each sees what a router of its kind would: loads as old as reports are, its own requests at once, and engines' caches
where the project listens to cache events. What a formula leaves open is the project's default.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kllm.sim.flights import Flight
from kllm.sim.instances import Instance
from kllm_core.fleet import EngineLoad

_UNKNOWN = EngineLoad(age_seconds=0.0)


class Rule(Protocol):
    """Chooses among instances, of which there is at least one."""

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:
        """Where a prompt is computed."""
        ...

    def decode(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:
        """Where it generates."""
        ...


class RoundRobin:
    """In turn, for both roles together."""

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """The next one."""
        return able[next(self._turns) % len(able)]

    decode = prefill


class LeastLoad:
    """The one with the fewest requests; equals take turns."""

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """The emptiest one."""
        return _least(able, lambda each: len(each.flights), next(self._turns))

    decode = prefill


class DynamoCost:
    """Dynamo's KV router: prefill blocks that are left to compute after credit for cached ones, with its own load.

    `prefill_load_scale` 1, credit 1 for device and 0.75 for host blocks without decay, temperature 0. Its router for
    prefill counts no decode blocks; that for decode counts nothing else and chooses after prefill
    (lib/kv-router/src/scheduling/selector/default.rs).
    """

    host_credit = 0.75

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:
        """Least queued tokens plus own tokens less credit."""

        def cost(each: Instance) -> float:
            size, found = each.working.spec.block_tokens, each.working.pool.cache.match(flight.blocks)
            credit = (found.device + self.host_credit * found.host) * size
            return max(0.0, _queued(each, now) + flight.prompt_tokens - credit)

        return _least(able, cost, next(self._turns))

    def decode(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """Fewest KV blocks in use."""
        return _least(able, lambda each: _kv_used(each, now), next(self._turns))


class CacheAware:
    """SMG's cache_aware: a tree of prompts per worker that it keeps itself, unless loads differ too much.

    Above 64 requests and 1.5 times between the most and the least loaded: the shortest queue. Else a match of more than
    0.3 of the prompt: the best match. Else the smallest tree (of 2^24 characters at most, taken as 4 per token).
    """

    absolute, relative, threshold = 64, 1.5, 0.3
    most_tokens = 2**24 // 4

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns
        self._trees: dict[str, OrderedDict[int, None]] = {}

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """By load or by tree; the prompt becomes a part of the chosen one's tree."""
        chosen = self._chosen(flight, able)
        tree, most = self._tree(chosen), self.most_tokens // chosen.working.spec.block_tokens
        for block in flight.blocks:
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > most:
            tree.popitem(last=False)
        return chosen

    def decode(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """The shortest queue."""
        return _least(able, lambda each: len(each.flights), next(self._turns))

    def _chosen(self, flight: Flight, able: Sequence[Instance]) -> Instance:
        loads = [len(each.flights) for each in able]
        if max(loads) - min(loads) > self.absolute and max(loads) > self.relative * min(loads):
            return _least(able, lambda each: len(each.flights), next(self._turns))
        matched = [self._matched(each, flight) for each in able]
        best = max(matched)
        if best and best > self.threshold * len(flight.blocks):
            return able[matched.index(best)]
        return _least(able, lambda each: len(self._tree(each)), next(self._turns))

    def _tree(self, instance: Instance) -> OrderedDict[int, None]:
        return self._trees.setdefault(instance.id, OrderedDict())

    def _matched(self, instance: Instance, flight: Flight) -> int:
        tree, depth = self._tree(instance), 0
        for block in flight.blocks:
            if block not in tree:
                break
            depth += 1
        return depth


class LlmdWeights:
    """llm-d's guides for separate pools: prefill by 3 prefix + 2 queue + 2 KV; decode by 2 requests + 3 prefix.

    Prefix is the share of the prompt that is cached, queue and requests are (most - own) / (most - least), KV is the
    free share. Decode engines of the simulator cache no prefixes, so that this term is equal for all of them.
    """

    def __init__(self, turns: Iterator[int]) -> None:
        self._turns = turns

    def prefill(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:
        """The highest weighted score."""
        queue = _spread([_load(each, now).queued_requests or 0 for each in able])
        scores = {}
        for each, emptiness in zip(able, queue, strict=True):
            found = each.working.pool.cache.match(flight.blocks).blocks
            prefix = found / len(flight.blocks) if flight.blocks else 0.0
            free = 1.0 - (_load(each, now).kv_used_tokens or 0) / each.working.spec.kv_tokens
            scores[each] = 3 * prefix + 2 * emptiness + 2 * free
        return _least(able, lambda each: -scores[each], next(self._turns))

    def decode(self, flight: Flight, able: Sequence[Instance], now: float) -> Instance:  # noqa: ARG002
        """The fewest requests."""
        return _least(able, lambda each: len(each.flights), next(self._turns))


def _least(able: Sequence[Instance], cost: Callable[[Instance], float], turn: int) -> Instance:
    costs = [cost(each) for each in able]
    least = min(costs)
    equal = [each for each, its in zip(able, costs, strict=True) if its == least]
    return equal[turn % len(equal)]


def _load(instance: Instance, now: float) -> EngineLoad:
    return instance.look(now)[0].load or _UNKNOWN


def _queued(instance: Instance, now: float) -> float:
    """Prompt tokens that it has still to compute, those on their way included."""
    return (_load(instance, now).queued_uncached_tokens or 0) + instance.unreported[1]


def _kv_used(instance: Instance, now: float) -> int:
    return (_load(instance, now).kv_used_tokens or 0) + instance.unreported[1]


def _spread(values: Sequence[int]) -> list[float]:
    most, least = max(values), min(values)
    return [1.0 if most == least else (most - value) / (most - least) for value in values]
