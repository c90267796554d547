from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kllm_core.blocks import block_hashes
from kllm_engine.agent.cache.book import PART_BLOCKS, CacheBook, SnapshotPart
from kllm_engine.agent.cache.changes import Change, Cleared, Removed, Stored, Tier
from kllm_engine.agent.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kllm_engine.agent.cache.log import ChangeLog
from kllm_engine.agent.cache.mirror import CacheMirror, UnknownParentError

PAGE = 4


def stored(first_hash: int, tokens: list[int], *, parent: int | None = None, **fields: object) -> BlockStored:
    count = len(tokens) // PAGE
    hashes = list(range(first_hash, first_hash + count))
    return BlockStored(
        block_hashes=hashes, token_ids=tokens, block_size=PAGE, parent_block_hash=parent, medium="GPU", **fields
    )


def test_blocks_get_the_hashes_that_a_router_computes_from_the_tokens() -> None:
    mirror = CacheMirror(PAGE)
    tokens = list(range(20))
    mirror.apply(stored(-7, tokens[:8]))
    mirror.apply(stored(100, tokens[8:], parent=-6))
    assert set(mirror.blocks(Tier.DEVICE)) == set(block_hashes(tokens, PAGE))


def test_adapter_and_salt_are_part_of_the_hash() -> None:
    mirror = CacheMirror(PAGE)
    tokens = [1, 2, 3, 4]
    mirror.apply(stored(1, tokens))
    mirror.apply(stored(2, tokens, lora_id=5))
    mirror.apply(stored(3, tokens, cache_salt="tenant"))
    expected = (
        block_hashes(tokens, PAGE) + block_hashes(tokens, PAGE, adapter="5") + block_hashes(tokens, PAGE, salt="tenant")
    )
    assert set(mirror.blocks(Tier.DEVICE)) == set(expected)
    assert len(set(expected)) == 3


def test_bigram_tokens_count_as_their_first_half() -> None:
    mirror = CacheMirror(PAGE)
    mirror.apply(stored(1, [(1, 2), (2, 3), (3, 4), (4, 5)]))
    assert mirror.blocks(Tier.DEVICE) == tuple(block_hashes([1, 2, 3, 4], PAGE))


def test_an_unknown_parent_is_an_error_that_changes_nothing() -> None:
    mirror = CacheMirror(PAGE)
    with pytest.raises(UnknownParentError):
        mirror.apply(stored(1, [1, 2, 3, 4], parent=99))
    assert len(mirror) == 0


def test_tokens_that_do_not_fill_the_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4 tokens came with 4 tokens"):
        CacheMirror(PAGE).apply(BlockStored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=PAGE))


def test_a_block_in_two_tiers_is_removed_from_one_only_and_still_is_a_parent() -> None:
    mirror = CacheMirror(PAGE)
    mirror.apply(stored(1, [1, 2, 3, 4]))
    mirror.apply(BlockStored(block_hashes=[1], token_ids=[1, 2, 3, 4], block_size=PAGE, medium="CPU_PINNED"))
    block = block_hashes([1, 2, 3, 4], PAGE)[0]
    assert mirror.apply(BlockRemoved(block_hashes=[1], medium="GPU")) == Removed(Tier.DEVICE, (block,))
    assert mirror.blocks(Tier.HOST) == (block,)
    change = mirror.apply(stored(2, [5, 6, 7, 8], parent=1))
    assert change == Stored(Tier.DEVICE, (block_hashes(list(range(1, 9)), PAGE)[1],))


def test_blocks_of_another_size_or_medium_are_left_out() -> None:
    mirror = CacheMirror(PAGE)
    assert mirror.apply(BlockStored(block_hashes=[1], token_ids=[1], block_size=1)) is None
    assert mirror.apply(BlockStored(block_hashes=[1], token_ids=[1, 2, 3, 4], block_size=PAGE, medium="TAPE")) is None
    assert mirror.apply(BlockRemoved(block_hashes=[1], medium="TAPE")) is None


def apply_to_sets(tiers: dict[Tier, set[int]], change: Change | SnapshotPart) -> None:
    """What a subscriber does."""
    match change:
        case SnapshotPart():
            if change.first:
                for blocks in tiers.values():
                    blocks.clear()
            tiers[change.tier].update(change.blocks)
        case Stored():
            tiers[change.tier].update(change.blocks)
        case Removed():
            tiers[change.tier].difference_update(change.blocks)
        case Cleared():
            for blocks in tiers.values():
                blocks.clear()


class BookMachine(RuleBasedStateMachine):
    """Book, a subscriber that keeps up, and one that falls behind a small log, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CacheBook(PAGE, log_limit=6)
        self.model: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.next_hash = 1
        self.fast = ({tier: set() for tier in Tier}, [0])
        self.slow = ({tier: set() for tier in Tier}, [0])

    def _known(self) -> list[int]:
        return sorted({engine for tier in self.model.values() for engine in tier})

    @rule(data=st.data(), tier=st.sampled_from(list(Tier)), pages=st.integers(1, 3))
    def store(self, data: st.DataObject, tier: Tier, pages: int) -> None:
        known = self._known()
        parent = data.draw(st.sampled_from([None, *known]))
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=pages * PAGE, max_size=pages * PAGE))
        hashes = list(range(self.next_hash, self.next_hash + pages))
        self.next_hash += pages
        prefix = () if parent is None else self.prefixes[parent]
        self.book.apply(
            BlockStored(
                block_hashes=hashes, token_ids=tokens, block_size=PAGE, parent_block_hash=parent, medium=tier.value
            )
        )
        for at, engine in enumerate(hashes):
            self.prefixes[engine] = prefix + tuple(tokens[: (at + 1) * PAGE])
            self.model[tier][engine] = block_hashes(self.prefixes[engine], PAGE)[-1]

    @rule(data=st.data(), tier=st.sampled_from(list(Tier)))
    def remove(self, data: st.DataObject, tier: Tier) -> None:
        held = sorted(self.model[tier])
        gone = data.draw(st.lists(st.sampled_from([*held, -1]), max_size=4, unique=True))
        self.book.apply(BlockRemoved(block_hashes=gone, medium=tier.value))
        for engine in gone:
            self.model[tier].pop(engine, None)

    @rule()
    def clear(self) -> None:
        self.book.apply(AllBlocksCleared())
        for tier in self.model.values():
            tier.clear()

    @rule()
    def slow_subscriber_reads(self) -> None:
        self._follow(self.slow)
        self._agrees(self.slow[0])

    @invariant()
    def fast_subscriber_agrees(self) -> None:
        self._follow(self.fast)
        self._agrees(self.fast[0])

    def _follow(self, subscriber: tuple[dict[Tier, set[int]], list[int]]) -> None:
        tiers, following = subscriber
        for sequence, change in self.book.read(following[0]):
            apply_to_sets(tiers, change)
            following[0] = sequence + 1
        assert self.book.read(following[0]) == []

    def _agrees(self, tiers: dict[Tier, set[int]]) -> None:
        assert tiers == {tier: set(held.values()) for tier, held in self.model.items()}


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBook = BookMachine.TestCase


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 20))
def test_the_log_keeps_its_newest_changes_in_order_and_within_its_limit(sizes: list[int], limit: int) -> None:
    log = ChangeLog(limit)
    everything: list[Change] = [Cleared()]
    for size in sizes:
        everything.append(Stored(Tier.DEVICE, tuple(range(size))))
        log.append(everything[-1])
    assert log.sequence == len(everything)
    kept = log.since(log.first)
    assert kept == [(number, everything[number - 1]) for number in range(log.first, log.sequence + 1)]
    assert len(kept) == 1 or sum(1 if isinstance(c, Cleared) else 1 + len(c.blocks) for _, c in kept) <= limit
    assert log.since(log.first - 1) is None
    assert log.since(log.sequence + 1) == []
    assert log.since(log.sequence + 2) is None


def test_a_large_snapshot_comes_in_bounded_parts_of_one_sequence() -> None:
    book = CacheBook(1)
    count = PART_BLOCKS * 2 + 5
    book.apply(BlockStored(block_hashes=list(range(count)), token_ids=[7] * count, block_size=1))
    parts = book.read(0)
    assert [len(part.blocks) for _, part in parts] == [PART_BLOCKS, PART_BLOCKS, 5]
    assert {sequence for sequence, _ in parts} == {book.sequence}
    assert [(part.first, part.last) for _, part in parts] == [(True, False), (False, False), (False, True)]
    assert all(len(change.blocks) <= PART_BLOCKS for _, change in book.read(2))


def test_an_empty_cache_has_a_snapshot_too() -> None:
    assert CacheBook(PAGE).read(0) == [(1, SnapshotPart(Tier.DEVICE, (), first=True, last=True))]


def test_a_rebuild_tells_subscribers_to_forget_and_then_what_is_there() -> None:
    book = CacheBook(PAGE)
    book.apply(stored(1, [1, 2, 3, 4]))
    following = book.sequence + 1
    book.rebuild([stored(5, [9, 9, 9, 9]), stored(6, [1, 1, 1, 1], parent=404)])
    assert [change for _, change in book.read(following)] == [
        Cleared(),
        Stored(Tier.DEVICE, tuple(block_hashes([9, 9, 9, 9], PAGE))),
    ]
    assert book.skipped_events == 1
