from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kllm_router.scheduling.prefix import PrefixIndex, PrefixMatch, Tier

NAMES = ("a", "b", "c")
CHAIN = tuple(range(100, 112))
BLOCKS = st.lists(st.sampled_from(CHAIN), max_size=8)


def expected(model: dict[tuple[str, Tier], set[int]], chain: tuple[int, ...]) -> dict[str, PrefixMatch]:
    found = {}
    for name in NAMES:
        counts = dict.fromkeys(Tier, 0)
        for block in chain:
            tier = next((tier for tier in Tier if block in model.get((name, tier), set())), None)
            if tier is None:
                break
            counts[tier] += 1
        if any(counts.values()):
            found[name] = PrefixMatch(*counts.values())
    return found


class IndexAgainstSets(RuleBasedStateMachine):
    """The index says what a plain dictionary of sets says, whatever happened before."""

    @initialize()
    def begin_all(self) -> None:
        self.index = PrefixIndex()
        self.model: dict[tuple[str, Tier], set[int]] = {}
        self.current = dict.fromkeys(NAMES, 1)
        for name in NAMES:
            self.index.begin(name, 1)

    @rule(name=st.sampled_from(NAMES), tier=st.sampled_from(Tier), blocks=BLOCKS)
    def store(self, name: str, tier: Tier, blocks: list[int]) -> None:
        self.index.store(name, self.current[name], tier, blocks)
        if self.current[name]:
            self.model.setdefault((name, tier), set()).update(blocks)

    @rule(name=st.sampled_from(NAMES), tier=st.sampled_from(Tier), blocks=BLOCKS)
    def remove(self, name: str, tier: Tier, blocks: list[int]) -> None:
        self.index.remove(name, self.current[name], tier, blocks)
        self.model.get((name, tier), set()).difference_update(blocks)

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name: str) -> None:
        self.index.clear(name, self.current[name])
        self.drop(name)

    @rule(name=st.sampled_from(NAMES), incarnation=st.integers(1, 3))
    def restart(self, name: str, incarnation: int) -> None:
        self.index.begin(name, incarnation)
        if incarnation != self.current[name]:
            self.drop(name)
        self.current[name] = incarnation

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.index.forget(name)
        self.drop(name)
        self.current[name] = 0

    @rule(name=st.sampled_from(NAMES), blocks=BLOCKS)
    def hear_from_another_incarnation(self, name: str, blocks: list[int]) -> None:
        self.index.store(name, 99, Tier.DEVICE, blocks)
        self.index.remove(name, 99, Tier.DEVICE, blocks)
        self.index.clear(name, 99)

    @invariant()
    def matches_are_equal(self) -> None:
        for length in (0, 1, 3, len(CHAIN)):
            assert self.index.match(CHAIN[:length]) == expected(self.model, CHAIN[:length])
        assert self.index.blocks == sum(len(blocks) for blocks in self.model.values())

    def drop(self, name: str) -> None:
        for tier in Tier:
            self.model.pop((name, tier), None)


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_inner_block_that_left_ends_the_prefix_and_its_return_restores_it():
    index = PrefixIndex()
    index.begin("a", 1)
    index.store("a", 1, Tier.DEVICE, CHAIN)

    index.remove("a", 1, Tier.DEVICE, [CHAIN[3]])
    assert index.match(CHAIN)["a"].blocks == 3
    index.store("a", 1, Tier.HOST, [CHAIN[3]])
    assert index.match(CHAIN)["a"] == PrefixMatch(device=len(CHAIN) - 1, host=1)


@given(limit=st.integers(0, 12))
def test_a_full_index_takes_no_more_and_counts_what_it_left_out(limit: int):
    index = PrefixIndex(max_blocks=limit)
    index.begin("a", 1)

    index.store("a", 1, Tier.DEVICE, CHAIN)

    assert index.blocks == limit
    assert index.refused == len(CHAIN) - limit
    assert index.match(CHAIN).get("a", PrefixMatch()).blocks == limit


def test_bits_of_instances_that_left_are_used_again():
    index = PrefixIndex()
    for n in range(1000):
        index.begin(f"i{n}", 1)
        index.store(f"i{n}", 1, Tier.DEVICE, CHAIN)
        index.forget(f"i{n}")
    index.begin("last", 1)
    index.store("last", 1, Tier.DEVICE, CHAIN[:2])

    assert index.match(CHAIN) == {"last": PrefixMatch(device=2)}
    assert index._instances["last"].bit == 1
