from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kllm_router.scheduling.binding import bind_after
from kllm_router.scheduling.choices import Refused
from kllm_router.scheduling.slack import SlackAdmission, SlackSettings, fair_level
from kllm_router.scheduling.transfers import TransferTimes

OBJECTIVE = SlackSettings(ttft_seconds=2.0, prefill_share=1.0)


def offer(admission: SlackAdmission, key: str, *, wait: float, own: float = 0.1, now: float = 0.0):
    return admission.decide(key, own_seconds=own, wait_seconds=wait, instances=1, now=now)


def test_without_an_objective_everybody_is_let_in():
    assert offer(SlackAdmission(), "a", wait=1000.0) is None


def test_who_would_be_late_is_refused_at_once_and_told_when_to_come_back():
    admission = SlackAdmission(OBJECTIVE)

    assert offer(admission, "a", wait=1.8) is None
    refusal = offer(admission, "a", wait=6.9)
    assert refusal is not None
    assert refusal.reason is Refused.OVERLOADED
    assert refusal.retry_after_seconds == pytest.approx(5.0)
    assert "7.0 s" in refusal.message


def test_a_prompt_that_takes_longer_than_the_objective_is_let_in_when_the_queue_is_short():
    admission = SlackAdmission(OBJECTIVE)

    assert offer(admission, "a", own=5.0, wait=0.5) is None
    assert offer(admission, "a", own=5.0, wait=1.5) is not None


class Server:
    """One server whose queue is what was let in, and keys that ask at steady rates."""

    def __init__(self, asks: dict[str, tuple[float, float]], seconds: float = 300.0) -> None:
        """Asks: by key, seconds of work of one request, and times how much of the server's time it asks for."""
        self.admission = SlackAdmission(OBJECTIVE)
        self.had = dict.fromkeys(asks, 0.0)
        self.gaps = dict.fromkeys(asks, 0.0)
        arrivals = sorted(
            (n * own / share, key, own) for key, (own, share) in asks.items() for n in range(int(seconds * share / own))
        )
        free_at, last = 0.0, dict.fromkeys(asks, 0.0)
        for at, key, own in arrivals:
            self.gaps[key] = max(self.gaps[key], at - last[key])
            if offer(self.admission, key, wait=max(0.0, free_at - at), own=own, now=at) is None:
                free_at = max(free_at, at) + own
                last[key] = at
                if at > seconds / 2:
                    self.had[key] += own
        whole = sum(self.had.values())
        self.shares = {key: had / whole for key, had in self.had.items()}


def test_keys_that_ask_for_too_much_get_equal_shares_whoever_asks_more():
    shares = Server({"greedy": (0.1, 3.0), "modest": (0.1, 0.8)}).shares

    assert shares["modest"] == pytest.approx(0.5, abs=0.06)


def test_a_key_below_its_share_gets_all_it_asks_for_even_with_long_prompts():
    server = Server({"greedy": (0.1, 2.0), "small": (1.5, 0.2)})

    assert server.shares["small"] == pytest.approx(0.2, abs=0.03)


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.sampled_from([0.05, 0.3, 1.0, 3.0]), st.sampled_from([0.1, 0.5, 2.0])),
        min_size=1,
    )
)
@settings(deadline=None)
def test_no_key_starves(asks):
    server = Server(asks, seconds=200.0)

    # A key that asks for little asks rarely by itself.
    for key, (own, share) in asks.items():
        assert server.gaps[key] <= 40.0 + own / share


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20), st.floats(0.1, 200.0))
def test_the_fair_level_gives_out_all_there_is_and_no_more(asked, room):
    level = fair_level(asked, room)

    if math.isinf(level):
        assert sum(asked) <= room
    else:
        assert sum(min(each, level) for each in asked) == pytest.approx(room)


def test_keys_that_are_remembered_are_bounded():
    admission = SlackAdmission(SlackSettings(ttft_seconds=2.0, max_keys=10))
    for number in range(1000):
        offer(admission, f"key-{number}", wait=0.0)

    assert len(admission._accounts) == 10


def test_decode_is_asked_when_the_rest_of_the_prefill_takes_as_long_as_the_handshake():
    assert bind_after(0.5, handshake_seconds=0.02) == pytest.approx(0.48)
    assert bind_after(0.01, handshake_seconds=0.02) == 0.0


def test_a_slow_link_is_told_from_the_others_and_unknown_ones_are_like_them():
    times = TransferTimes()
    for _ in range(300):
        for tokens in (500, 4000, 12_000):
            for decode, slower in (("d0", 1.0), ("d1", 1.0), ("d2", 4.0)):
                times.observe("p", decode, tokens, slower * (0.02 + tokens * 1e-5))

    fast, slow = times.estimate("p", "d0", 8000), times.estimate("p", "d2", 8000)
    assert slow / fast == pytest.approx(4.0, rel=0.15)
    assert fast == pytest.approx(0.1, rel=0.35)
    assert fast * 0.6 < times.estimate("p", "new", 8000) < slow
    times.forget("d2")
    assert times.estimate("p", "d2", 8000) == times.estimate("p", "new", 8000)


@given(st.lists(st.tuples(st.integers(-5, 200_000), st.floats(allow_nan=True)), max_size=60))
def test_transfer_times_stay_finite_whatever_is_measured(measured):
    times = TransferTimes()
    for tokens, seconds in measured:
        times.observe("p", "d", tokens, seconds)

    assert 0.0 <= times.estimate("p", "d", 1000) < math.inf
