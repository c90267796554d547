"""Block hashes stand for a block and everything before it."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kllm_core.blocks import block_hashes, extend_chain, root_hash

ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)
pages = st.integers(1, 64)


def test_hash_is_xxh3_of_the_parent_and_little_endian_ids():
    parent = root_hash()
    data = parent.to_bytes(8, "little") + b"".join(i.to_bytes(4, "little") for i in (1, 2, 3, 4))

    assert block_hashes([1, 2, 3, 4], 4) == [xxhash.xxh3_64_intdigest(data)]


@given(ids, pages)
def test_one_hash_per_full_block_and_none_for_the_tail(token_ids, page):
    assert len(block_hashes(token_ids, page)) == len(token_ids) // page


@given(ids, ids, pages)
def test_extending_a_chain_equals_hashing_the_whole(head, tail, page):
    head = head[: len(head) // page * page]
    first = block_hashes(head, page)

    rest = extend_chain(first[-1] if first else root_hash(), tail, page)

    assert first + rest == block_hashes(head + tail, page)


@given(ids, pages, st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(token_ids, page, data):
    full = len(token_ids) // page * page
    if not full:
        return
    position = data.draw(st.integers(0, full - 1))
    changed = [*token_ids]
    changed[position] ^= 1

    before, after = block_hashes(token_ids, page), block_hashes(changed, page)

    block = position // page
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_adapter_and_salt_separate_equal_prompts():
    prompt = list(range(16))
    chains = [
        block_hashes(prompt, 16, adapter=adapter, salt=salt)[0]
        for adapter, salt in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    ]

    assert len(set(chains)) == len(chains)


@pytest.mark.parametrize(("token_ids", "page"), [([1], 0), ([-1] * 4, 4), ([2**32] * 4, 4)])
def test_impossible_arguments_are_refused(token_ids, page):
    with pytest.raises(ValueError, match="must be"):
        block_hashes(token_ids, page)
