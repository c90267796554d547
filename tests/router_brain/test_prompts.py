"""What the router remembers of prompts on their way: expected prefixes, work that was sent, and what is learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_brain.brain_helpers import instance

from kllm_core.timing import PrefillTiming
from kllm_router.scheduling.assigned import Assigned, Assignment
from kllm_router.scheduling.choices import Choice
from kllm_router.scheduling.expected import ExpectedPrefixes, marks
from kllm_router.scheduling.learning import PrefillLearner
from kllm_router.scheduling.prefill import PrefillCandidate, PrefillSettings, choose_prefill
from kllm_router.scheduling.prefix import NO_MATCH, PrefixMatch, TierCredit
from kllm_router.scheduling.prompts import Prompts

CHAIN = list(range(1000, 1100))


def common(first: list[int], second: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@st.composite
def chains(draw: st.DrawFn) -> list[int]:
    """Chains of hashes that share beginnings, as hashes of blocks do."""
    turns = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 20)), max_size=4))
    chain: list[int] = []
    for branch, blocks in turns:
        for _ in range(blocks):
            chain.append(hash((chain[-1] if chain else 0, branch)) & 0xFFFFFFFFFFFF)
    return chain


@given(st.lists(st.tuples(st.sampled_from("ab"), chains()), max_size=8), chains())
@settings(deadline=None)
def test_what_is_expected_is_never_more_than_was_sent_and_whole_prompts_are_found(sent, asked):
    expected = ExpectedPrefixes()
    for name, chain in sent:
        expected.note(name, marks(chain), 0.0)

    found = expected.match(asked, 1.0)

    for name in "ab":
        most = max((common(chain, asked) for holder, chain in sent if holder == name), default=0)
        whole = max(
            (len(chain) for holder, chain in sent if holder == name and asked[: len(chain)] == chain), default=0
        )
        assert whole <= found.get(name, 0) <= most
        assert found.get(name, 0) >= most * 2 // 3 or most < 2


def test_expectations_end_with_their_time_and_with_the_instance():
    expected = ExpectedPrefixes(ttl_seconds=10.0)
    expected.note("a", marks(CHAIN), 0.0)
    expected.note("b", marks(CHAIN), 5.0)
    expected.note("c", marks(CHAIN), 5.0)
    expected.forget("c")

    assert expected.match(CHAIN, 9.0) == {"a": 100, "b": 100}
    assert expected.match(CHAIN, 11.0) == {"b": 100}
    expected.keep_until("b", marks(CHAIN), 12.0)
    assert expected.match(CHAIN, 12.5) == {}


@given(count=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_marks_are_bounded_and_the_oldest_are_forgotten(count: int):
    expected = ExpectedPrefixes(max_marks=50)
    for number in range(count):
        expected.note("a", marks([number * 1000 + n for n in range(40)]), float(number))

    assert len(expected) <= 50
    assert expected.match([(count - 1) * 1000 + n for n in range(40)], float(count)) == {"a": 40}


def test_heat_counts_prompts_that_share_a_prefix_and_fades():
    expected = ExpectedPrefixes()
    for number in range(20):
        expected.note("a", marks([*CHAIN[:16], 5000 + number]), 0.0)

    assert expected.heat(CHAIN, 16, 0.0) == pytest.approx(20.0)
    assert expected.heat(CHAIN, 16, 60.0) == pytest.approx(20.0 / np.e)
    assert expected.heat([7, 8, 9], 3, 0.0) == 0.0


def sent(name: str, tokens: int, seconds: float) -> Assignment:
    return Assignment(name, NO_MATCH, (), tokens, seconds)


def test_pace_is_of_what_waits_and_pressure_of_what_was_sent_lately():
    assigned = Assigned(window_seconds=10.0)
    assigned.send("r1", sent("a", 1000, 1.0), 0.0)
    assigned.send("r2", sent("a", 3000, 5.0), 0.0)

    assert assigned.pace("a") == pytest.approx(6.0 / 4000)
    assert assigned.pressure("a", 0.0) == pytest.approx(0.6)
    assert assigned.settle("r1") == sent("a", 1000, 1.0)
    assert assigned.settle("r1") is None
    assert assigned.pace("a") == pytest.approx(5.0 / 3000)
    assert assigned.pressure("a", 10.0) == pytest.approx(0.6 / np.e)
    assigned.forget("a")
    assert (assigned.pace("a"), assigned.pressure("a", 10.0), assigned.get("r2")) == (None, 0.0, None)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.integers(1, 9999)), max_size=40))
def test_nothing_waits_when_all_has_settled(steps):
    assigned = Assigned()
    for key, name, tokens in steps:
        assigned.send(key, sent(name, tokens, tokens * 1e-4), 0.0)
    for key in range(6):
        assigned.settle(key)

    assert assigned.pace("a") is None
    assert assigned.pace("b") is None


@pytest.mark.parametrize("true", [PrefillTiming(0.008, 4.7e-5, 1.1e-9), PrefillTiming(0.02, 1e-3, 0.0)])
def test_the_learned_timing_comes_to_what_prompts_take_when_they_are_alone(true: PrefillTiming):
    rng = np.random.default_rng(1)
    learner = PrefillLearner()
    for _ in range(1500):
        new, cached = int(rng.lognormal(8, 1.2)) + 1, int(rng.integers(0, 20_000))
        shared = 1.0 + (rng.random() < 0.4) * rng.exponential(1.0)
        learner.observe(new, cached, true.seconds(new, cached) * shared)

    for new, cached in ((500, 0), (4000, 0), (4000, 20_000), (50_000, 0)):
        assert learner.timing.seconds(new, cached) == pytest.approx(true.seconds(new, cached), rel=0.15)


@pytest.mark.parametrize("nonsense", [(0, 5, 1.0), (5, -1, 1.0), (5, 5, 0.0), (5, 5, float("nan"))])
def test_numbers_that_make_no_sense_teach_nothing(nonsense):
    learner = PrefillLearner()
    before = learner.timing

    learner.observe(*nonsense)

    assert (learner.timing, learner.prompts) == (before, 0)


@pytest.mark.parametrize("credit", [0.1, 0.9])
def test_the_credit_of_a_tier_is_what_loading_from_it_was_seen_to_spare(credit: float):
    timing = PrefillTiming(0.01, 1e-4, 0.0)
    learner = PrefillLearner(timing, TierCredit(host=0.5))
    for _ in range(100):
        loading = (1.0 - credit) * 8000 * 1e-4
        learner.observe(1000, 8000, timing.seconds(1000) + loading, match=PrefixMatch(host=500))

    assert learner.credit.host == pytest.approx(credit, abs=0.05)
    assert learner.credit.disk == TierCredit().disk


def candidates(**values: float) -> list[PrefillCandidate]:
    return [PrefillCandidate(instance(name, queued_uncached_tokens=0), 0.1) for name in ("a", "b")]


def test_a_prompt_that_is_computed_now_draws_those_that_begin_like_it():
    prompts = Prompts()
    seen = prompts.candidates(candidates(), chain=CHAIN, matches={}, now=0.0)
    prompts.sent("r1", seen[1], marks=marks(CHAIN), prompt_tokens=1600, now=0.0)

    following = [*CHAIN, 7, 8]
    known = prompts.candidates(candidates(), chain=following, matches={}, now=0.1)
    choice = prompts.choose(known, chain=following, prompt_tokens=1640, now=0.1)

    assert [each.match.blocks for each in known] == [0, 100]
    assert isinstance(choice, Choice)
    assert choice.instance_id == "b"
    assert prompts.uncached("r1") == 1600


def test_what_leaves_before_it_is_computed_is_expected_no_more_and_what_is_told_only_for_a_moment():
    prompts = Prompts()
    for key, chain in (("left", CHAIN), ("told", [1, 2, 3]), ("untold", [4, 5, 6])):
        known = prompts.candidates(candidates(), chain=chain, matches={}, now=0.0)
        prompts.sent(key, known[0], marks=marks(chain), prompt_tokens=100, now=0.0)
    prompts.left("left", 1.0)
    for key in ("told", "untold"):
        prompts.computed(key, new_tokens=100, cached_tokens=0, seconds=0.1, is_told=key == "told", now=1.0)

    assert prompts.expected.match(CHAIN, 1.5) == {}
    assert prompts.expected.match([1, 2, 3], 1.5) == {"a": 3}
    assert prompts.expected.match([1, 2, 3], 10.0) == {}
    assert prompts.expected.match([4, 5, 6], 300.0) == {"a": 3}


def taken(pressure: float, *, heat: float, queued: int = 0) -> str:
    """Who gets a prompt of 1,000 tokens of which one instance has 900 cached; its pressure, and tokens queued there."""
    holder = PrefillCandidate(
        instance("holder", queued_uncached_tokens=queued), 0.1, PrefixMatch(device=900), pressure=pressure
    )
    other = PrefillCandidate(instance("other", queued_uncached_tokens=0), 0.1)
    sized = [
        PrefillCandidate(
            each.instance.__class__(**{**each.instance.__dict__, "page_size": 1}),
            each.age_seconds, each.match, pressure=each.pressure,
        )
        for each in (holder, other)
    ]  # fmt: skip
    choice = choose_prefill(sized, prompt_tokens=1000, heat=heat, settings=PrefillSettings())
    assert isinstance(choice, Choice)
    return choice.instance_id


def test_thrift_waits_for_a_cached_prefix_unless_many_use_it():
    assert taken(0.0, heat=0.0, queued=3000) == "holder"
    assert taken(0.0, heat=100.0, queued=3000) == "other"


def test_a_much_used_prefix_is_computed_again_before_its_instance_has_a_queue():
    assert taken(0.3, heat=100.0) == "holder"
    assert taken(0.89, heat=100.0) == "other"
