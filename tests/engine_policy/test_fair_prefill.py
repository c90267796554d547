"""Short prompts first, long ones in parts: nobody starves, the KV budget is kept, and no step is wasted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_engine.policy.fair_prefill import FairPrefill, Prompt, Turn

CHUNK = 64
PAGE = 4
BUDGET = 1024


def pages(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


@dataclass
class Engine:
    """Computes what the policy says, and checks each turn."""

    policy: FairPrefill = field(default_factory=lambda: FairPrefill(CHUNK, BUDGET, PAGE))
    waiting: dict[str, Prompt] = field(default_factory=dict)
    steps: int = 0
    ended: dict[str, int] = field(default_factory=dict)

    def arrive(self, key: str, tokens: int) -> None:
        self.waiting[key] = Prompt(key, tokens, tokens)

    def step(self) -> Turn:
        before = dict(self.waiting)
        turn = self.policy.turn(list(before.values()))
        self.steps += 1
        self._check(turn, before)
        for key in turn.whole:
            del self.waiting[key]
            self.ended[key] = self.steps
        if turn.part is not None:
            prompt = before[turn.part]
            self.waiting[turn.part] = Prompt(prompt.key, prompt.tokens, prompt.rest - turn.part_tokens, begun=True)
        return turn

    def run(self, most: int = 100_000) -> None:
        while self.waiting:
            assert self.steps < most
            self.step()

    @staticmethod
    def _check(turn: Turn, before: dict[str, Prompt]) -> None:
        computed = sum(pages(before[key].rest) for key in turn.whole) + turn.part_tokens
        assert computed <= CHUNK
        assert computed > 0 or not before, "a step computes something while a prompt waits"
        entering = [*turn.whole, *([turn.part] if turn.part is not None else [])]
        assert len(set(entering)) == len(entering)
        assert sum(before[key].begun for key in entering) <= 1, "an engine goes on with one begun prompt"
        if turn.part is not None:
            assert 0 < turn.part_tokens < before[turn.part].rest
            assert turn.part_tokens % PAGE == 0
            begun = [prompt for prompt in before.values() if prompt.begun and prompt.rest > CHUNK]
            if not before[turn.part].begun and begun:
                assert sum(prompt.tokens for prompt in begun) + before[turn.part].tokens <= BUDGET


arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.one_of(st.integers(1, CHUNK), st.integers(CHUNK + 1, 1500))), max_size=40
)


@given(arrivals)
def test_every_prompt_ends_and_no_step_is_empty_while_one_waits(plan):
    engine = Engine()
    for number, (gap, tokens) in enumerate(plan):
        for _ in range(gap):
            engine.step()
        engine.arrive(str(number), tokens)
    engine.run()
    assert len(engine.ended) == len(plan)


@given(arrivals)
def test_a_step_is_full_or_no_further_short_prompt_fits(plan):
    engine = Engine()
    for number, (_, tokens) in enumerate(plan):
        engine.arrive(str(number), tokens)
    while engine.waiting:
        before = dict(engine.waiting)
        turn = engine.step()
        room = CHUNK - sum(pages(before[key].rest) for key in turn.whole) - turn.part_tokens
        left = [prompt for key, prompt in before.items() if key not in turn.whole and prompt.rest <= CHUNK]
        following = next((prompt for prompt in left if not prompt.begun), None)
        assert room == 0 or following is None or pages(following.rest) > room


@given(st.integers(CHUNK + 1, 3000), st.integers(1, CHUNK), st.integers(1, 4))
def test_a_long_prompt_ends_however_many_short_ones_keep_coming(tokens, short, at_once):
    engine = Engine()
    engine.arrive("long", tokens)
    number = 0
    while "long" in engine.waiting:
        while len(engine.waiting) <= at_once:
            number += 1
            engine.arrive(f"short{number}", short)
        engine.step()
        # Ten doublings lead from any first quota to the chunk, and then every second step is its own.
        assert engine.steps <= 2 * (10 + tokens // CHUNK + 2) + at_once
    assert engine.ended["long"] == engine.steps


@given(st.lists(st.integers(20 * CHUNK, 40 * CHUNK), min_size=1, max_size=6), st.integers(0, 12), st.integers(1, CHUNK))
def test_a_short_prompt_waits_for_one_step_at_most_whatever_is_in_progress(long, steps, tokens):
    engine = Engine()
    for number, size in enumerate(long):
        engine.arrive(f"long{number}", size)
    for number in range(steps):
        engine.arrive(f"before{number}", 1)
        engine.step()
    engine.waiting = {key: prompt for key, prompt in engine.waiting.items() if key.startswith("long")}
    before = engine.steps
    engine.arrive("short", tokens)
    while "short" in engine.waiting:
        engine.step()
    assert engine.ended["short"] - before <= 2


@given(
    st.integers(CHUNK + 1, 600),
    st.lists(st.tuples(st.integers(0, 2), st.integers(CHUNK + 1, 600)), min_size=1, max_size=60),
)
def test_all_that_overtake_a_long_prompt_have_half_of_its_tokens_at_most(tokens, later):
    engine = Engine(FairPrefill(CHUNK, 10_000_000, PAGE))
    engine.arrive("first", tokens)
    overtook: set[str] = set()
    for number, (gap, size) in enumerate(later):
        engine.arrive(f"later{number}", size)
        for _ in range(gap):
            turn = engine.step()
            if "first" in engine.waiting and turn.part not in {None, "first"}:
                # What is left of one that has begun is short, and goes on beside the others.
                overtook |= {turn.part} if engine.waiting["first"].rest > CHUNK else set()
    assert sum(size for number, (_, size) in enumerate(later) if f"later{number}" in overtook) <= tokens / 2


def test_each_yield_raises_the_next_quota_up_to_the_chunk():
    policy = FairPrefill(1024, 51_200, 4)
    long = Prompt("long", 100_000, 90_000, begun=True)
    quotas = []
    short = [Prompt(f"short{number}", 4, 4) for number in range(300)]
    for _ in range(40):
        turn = policy.turn([long, *short])
        if turn.part_tokens:
            quotas.append(turn.part_tokens)
    assert quotas[:5] == [100, 200, 400, 800, 1024]
    assert set(quotas[5:]) == {1024}


def test_a_prompt_begins_only_where_the_budget_holds_it_beside_those_in_progress():
    policy = FairPrefill(CHUNK, 1000, PAGE)
    running = Prompt("running", 600, 300, begun=True)
    assert policy.turn([running, Prompt("next", 500, 500)]).part == "running"
    assert FairPrefill(CHUNK, 2000, PAGE).turn([running, Prompt("next", 100, 100)]).part == "next"


def test_one_that_is_larger_than_the_budget_begins_when_nothing_is_in_progress_and_is_not_passed_for_ever():
    policy = FairPrefill(CHUNK, 1000, PAGE)
    running, huge = Prompt("running", 600, 300, begun=True), Prompt("huge", 5000, 5000)
    for number in range(200):
        # Short of the budget, and yet it waits: the huge one is due at some time, and nobody begins before it then.
        policy.turn([running, huge, Prompt(f"small{number}", 80, 80)])
    assert policy.turn([running, huge, Prompt("last", 80, 80)]).part == "running"
    assert policy.turn([huge, Prompt("last", 80, 80)]).part == "huge"


def test_short_prompts_have_steps_of_their_own_for_a_small_share_of_the_capacity():
    policy = FairPrefill(1600, 100_000, 4)
    long = Prompt("long", 1_000_000, 900_000, begun=True)
    alone = sum(policy.turn([long, Prompt(str(number), 16, 16)]).part is None for number in range(1000))
    # A step costs a sixteenth of a full one at least, and three in a hundred may be spent.
    assert 0 < alone / 1000 < 0.5


def test_a_step_with_less_room_takes_what_fits():
    policy = FairPrefill(CHUNK, BUDGET, PAGE)
    assert policy.turn([Prompt("a", 40, 40)], tokens=22).part_tokens == 20
    assert policy.turn([Prompt("a", 40, 40)], tokens=3).reason == "NothingFits"
    assert policy.turn([]).reason == "Nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 1), "chunk_tokens must be at least 1"),
        ((10, 0, 1), "budget_tokens must be at least 1"),
        ((10, 10, 0), "page_tokens must be at least 1"),
        ((10, 10, 16), "holds no page"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FairPrefill(*arguments)


def test_a_prompt_with_nothing_left_is_refused():
    with pytest.raises(ValueError, match="rest of a"):
        Prompt("a", 5, 0)
