"""What routers tell each other, and for how long they believe it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_router.scheduling.quota import NOTHING, Spent
from kllm_router.scheduling.share import NO_SHARE, Share, summed
from kllm_router.shared.exceptions import ToldError
from kllm_router.shared.homes import Homes
from kllm_router.shared.peers import Peers
from kllm_router.shared.told import MOST_BYTES, Told, decode, encode

COUNTS = st.integers(0, 1_000_000)
NAMES = st.text(max_size=60)
SHARES = st.dictionaries(NAMES, st.builds(Share, COUNTS, COUNTS, COUNTS), max_size=8)
SPENT = st.dictionaries(NAMES, st.builds(Spent, COUNTS, COUNTS, COUNTS), max_size=8)
HOMES = st.dictionaries(NAMES, st.lists(st.tuples(COUNTS, st.integers(0, 2**64 - 1)), max_size=5), max_size=8)


@given(st.builds(Told, st.integers(0, 2**40), SHARES, SPENT, HOMES))
def test_what_is_told_is_what_is_heard(told):
    assert decode(encode(told)) == told


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["sequence", "instances", "keys", "homes", "p0", ""]), inner, max_size=4
    ),
).map(orjson.dumps))  # fmt: skip
def test_garbage_is_refused_or_sound(data):
    try:
        told = decode(data)
    except ToldError:
        return
    assert all(count >= 0 for counts in (*told.shares.values(), *told.spent.values()) for count in counts)
    assert all(0 <= number < 2**64 for marks in told.homes.values() for mark in marks for number in mark)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": None},
        {"sequence": True},
        {"instances": []},
        {"instances": None},
        {"instances": {"p0": [1, 1]}},
        {"instances": {"p0": [1, 1, -1]}},
        {"instances": {"p0": [1, 1, 1.5]}},
        {"instances": {"p0": [1, 1, 10**13]}},
        {"instances": {"p" * 300: [1, 1, 1]}},
        {"instances": {f"p{i}": [1, 1, 1] for i in range(2001)}},
        {"keys": {"team": [1, 1]}},
        {"keys": {f"k{i}": [1, 1, 1] for i in range(1001)}},
        {"homes": {"p0": [1]}},
        {"homes": {"p0": [1, -1]}},
        {"homes": {f"p{i}": [1, 1] * 500 for i in range(10)}},
    ],
)
def test_what_is_not_of_the_form_is_refused(change):
    sound = {"sequence": 1, "instances": {}, "keys": {}, "homes": {}}
    assert decode(orjson.dumps(sound)) == Told(1)
    with pytest.raises(ToldError):
        decode(orjson.dumps({**sound, **change}))


def test_a_fleet_beyond_the_bound_is_told_by_its_busiest_instances():
    shares = {f"{i:04}".ljust(63, "x"): Share(1, 1, i) for i in range(5000)}
    data = encode(Told(1, shares))
    told = decode(data).shares

    assert len(data) <= MOST_BYTES
    assert len(told) == 2000
    assert min(share.unreported_tokens for share in told.values()) == 3000


def test_shares_of_many_are_added_by_instance():
    total = summed([{"p0": Share(1, 1, 100), "p1": Share(2, 0, 0)}, {"p0": Share(3, 2, 50)}])

    assert total == {"p0": Share(4, 3, 150), "p1": Share(2, 0, 0)}


def test_a_router_counts_while_it_tells_anew():
    peers = Peers(forget_seconds=1.0)
    for step in range(5):
        peers.hear("a", Told(step, {"p0": Share(1, 1, 10)}), step * 0.9)
        peers.settle(step * 0.9)
        assert peers.of("p0", step * 0.9 + 0.8) == Share(1, 1, 10)


def test_what_is_merely_still_there_is_no_news():
    peers = Peers(forget_seconds=1.0)
    for now in (0.0, 0.6, 1.2):
        peers.hear("a", Told(7, {"p0": Share(1, 1, 10)}), now)
        peers.settle(now)

    assert peers.of("p0", 1.2) == NO_SHARE
    assert len(peers) == 0


def test_all_is_forgotten_after_a_second_though_nobody_settles():
    peers = Peers(forget_seconds=1.0)
    peers.hear("a", Told(1, {"p0": Share(1, 1, 10)}), 0.0)
    peers.hear("b", Told(1, {"p0": Share(1, 1, 10)}), 0.5)
    peers.settle(0.5)

    assert peers.of("p0", 1.4) == Share(2, 2, 20)
    assert peers.of("p0", 1.6) == NO_SHARE


def test_what_is_taken_back_no_longer_counts():
    peers = Peers(forget_seconds=1.0)
    peers.hear("a", Told(1, {"p0": Share(1, 1, 10)}), 0.0)
    peers.settle(0.0)
    peers.forget("a")
    peers.settle(0.1)

    assert peers.of("p0", 0.1) == NO_SHARE


def test_what_is_left_of_a_router_that_hangs_is_not_taken_for_news_again():
    peers = Peers(forget_seconds=1.0)
    for step in range(100):
        peers.hear("a", Told(7, {"p0": Share(1, 1, 10)}), step * 0.3)
        peers.settle(step * 0.3)
        assert peers.of("p0", step * 0.3) == (Share(1, 1, 10) if step * 0.3 <= 1.0 else NO_SHARE)

    peers.hear("a", Told(8, {"p0": Share(1, 1, 10)}), 40.0)
    peers.settle(40.0)
    assert peers.of("p0", 40.0) == Share(1, 1, 10)


def test_what_the_keys_of_a_router_that_has_left_took_counts_for_the_rest_of_the_minute():
    peers = Peers(forget_seconds=1.0)
    peers.hear("a", Told(1, spent={"team": Spent(3, 60, 6000)}), 0.0)
    peers.hear("b", Told(1, spent={"team": Spent(1, 6, 600), "other": Spent(1, 1, 1)}), 0.0)
    assert peers.spent("team", 0.5) == Spent(4, 66, 6600)

    peers.forget("a")
    peers.hear("b", Told(2, spent={"team": Spent(1, 6, 600)}), 30.0)
    peers.settle(30.0)
    assert peers.spent("team", 30.0) == Spent(1, 36, 3600)
    assert peers.spent("team", 75.0).running == 0
    assert peers.spent("team", 100.0) == NOTHING


def test_a_router_that_comes_back_is_not_counted_twice():
    peers = Peers(forget_seconds=1.0)
    peers.hear("a", Told(1, spent={"team": Spent(0, 60, 0)}), 0.0)
    peers.settle(2.0)
    peers.hear("a", Told(2, spent={"team": Spent(0, 60, 0)}), 3.0)

    assert peers.spent("team", 3.0) == Spent(0, 60, 0)


def test_homes_are_passed_on_once_for_each_time_they_are_told():
    heard = []
    peers = Peers(forget_seconds=1.0, on_home=lambda *home: heard.append(home))
    told = Told(1, homes={"p0": [(1, 11)]})
    peers.hear("a", told, 1.0)
    peers.hear("a", told, 1.1)

    assert heard == [("p0", [(1, 11)], 1.0)]


def test_homes_are_told_for_a_few_rounds_and_only_so_many():
    homes = Homes()
    homes.settle("p0", [(1, 11), (2, 12)], 0.0)
    homes.settle("p1", [(1, 13)], 0.5)
    assert homes.told(0.6) == {"p0": [(1, 11), (2, 12)], "p1": [(1, 13)]}
    assert homes.told(1.0) == {"p1": [(1, 13)]}
    assert homes.told(2.0) == {}

    for number in range(10_000):
        homes.settle("p0", [(1, number)] * 10, 3.0)
    told = homes.told(3.0)
    assert len(told["p0"]) == 4000
    assert told["p0"][-1] == (1, 9999)
    assert decode(encode(Told(1, homes=told))).homes == told
