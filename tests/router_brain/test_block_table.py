from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm_router.scheduling.block_table import SLOTS, BlockTable


def filled(hashes: list[int], max_blocks: int = 100_000) -> BlockTable:
    table = BlockTable(max_blocks)
    for number, block in enumerate(hashes, start=1):
        assert table.reserve(block)
        table.set(block, number)
    return table


@given(seed=st.integers(0, 2**32), count=st.integers(0, 6000), rounds=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_it_says_what_a_dictionary_says_while_pages_are_split_and_swept(seed: int, count: int, rounds: int):
    rng = np.random.default_rng(seed)
    table, model = BlockTable(100_000), dict[int, int]()
    for _ in range(rounds):
        hashes = rng.integers(0, 2**64, count, dtype=np.uint64).tolist()
        for block in hashes:
            number = int(rng.integers(1, 1000))
            assert table.reserve(block)
            table.set(block, number)
            model[block] = number
        for block in list(model)[:: int(rng.integers(2, 5))]:
            table.set(block, 0)
            del model[block]
        asked = np.array([*model, *rng.integers(0, 2**64, 50, dtype=np.uint64).tolist()], np.uint64)
        assert table.get_many(asked).tolist() == [model.get(block, 0) for block in asked.tolist()]
    assert all(table.get(block) == number for block, number in model.items())


def test_hashes_that_agree_in_their_first_bits_find_a_place_or_are_refused():
    alike = [(1 << 63) | number for number in range(1, 2 * SLOTS)]
    table = BlockTable(100_000)
    taken: list[int] = []
    for block in alike:
        if table.reserve(block):
            taken.append(block)
            table.set(block, len(taken))

    assert len(taken) >= SLOTS // 2
    assert len(taken) < len(alike)
    assert table.get_many(np.array(taken, np.uint64)).tolist() == list(range(1, len(taken) + 1))
    # What leaves makes room again.
    table.set(taken[0], 0)
    assert table.reserve(alike[-1])


def test_hash_zero_is_one_like_any_other():
    table = filled([0, 5])

    assert (table.get(0), table.get(5)) == (1, 2)
    assert table.get_many(np.array([5, 0, 7], np.uint64)).tolist() == [2, 1, 0]


def test_a_number_without_a_place_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError):
        BlockTable(10).set(1, 1)
