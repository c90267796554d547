"""The prefix cache: what it finds, what it gives up, and what it may not."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kllm_core.engine_model.cache import Match, PrefixCache


def warm(cache, *prompts):
    for prompt in prompts:
        cache.pin(prompt)
        cache.unpin(prompt)


def test_a_prompt_is_found_up_to_the_first_block_that_is_missing():
    cache = PrefixCache()
    warm(cache, (1, 2, 3))
    assert cache.match((1, 2, 3, 4)) == Match(3, 0)
    assert cache.match((1, 9, 3)) == Match(1, 0)
    assert cache.match((9, 2, 3)) == Match(0, 0)


def test_the_ends_of_old_prompts_are_evicted_before_what_precedes_them():
    cache = PrefixCache()
    warm(cache, (1, 2, 3), (1, 4))
    assert cache.evict(1) == 1
    assert cache.match((1, 2, 3)) == Match(2, 0)
    assert cache.evict(2) == 2
    assert (cache.match((1, 2)), cache.match((1, 4))) == (Match(1, 0), Match(1, 0))


def test_what_is_used_is_not_evicted():
    cache = PrefixCache()
    cache.pin((1, 2))
    warm(cache, (1, 3))
    assert cache.evict(10) == 1
    assert cache.match((1, 2)) == Match(2, 0)
    assert (cache.used, cache.evictable) == (2, 0)


def test_what_is_evicted_is_found_in_the_second_tier_as_long_as_that_has_room():
    cache = PrefixCache(host_blocks=2)
    warm(cache, (1, 2, 3))
    cache.evict(2)
    assert cache.match((1, 2, 3)) == Match(1, 2)
    assert cache.pin((1, 2, 3)) == 2
    assert cache.in_host == 0
    cache.unpin((1, 2, 3))
    cache.evict(3)
    assert cache.in_host == 2
    # The end of the prompt was evicted first, and so has left the second tier first.
    assert cache.match((1, 2, 3)) == Match(0, 2)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=5)), max_size=40))
def test_blocks_are_used_exactly_as_long_as_a_request_uses_them(moves):
    """Ids are made to stand for all before them, as hashes of prefixes do."""
    cache, held = PrefixCache(), []
    for takes, path in moves:
        if takes or not held:
            prompt = tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))
            cache.pin(prompt)
            held.append(prompt)
        else:
            cache.unpin(held.pop(0))
            cache.evict(1)
        users = Counter(block for prompt in held for block in prompt)
        assert cache.used == len(users)
        assert all(cache.match(prompt).device == len(prompt) for prompt in held)
