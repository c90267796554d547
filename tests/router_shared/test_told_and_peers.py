"""What routers tell each other, and for how long they believe it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm_router.scheduling.share import NO_SHARE, Share, summed
from kllm_router.shared.exceptions import ToldError
from kllm_router.shared.peers import Peers
from kllm_router.shared.told import MOST_BYTES, Told, decode, encode

COUNTS = st.integers(0, 1_000_000)
SHARES = st.dictionaries(st.text(max_size=60), st.builds(Share, COUNTS, COUNTS, COUNTS), max_size=8)


@given(SHARES, st.integers(0, 2**40))
def test_what_is_told_is_what_is_heard(shares, sequence):
    assert decode(encode(Told(sequence, shares))) == Told(sequence, shares)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["sequence", "instances", "p0", ""]), inner, max_size=4
    ),
).map(orjson.dumps))  # fmt: skip
def test_garbage_is_refused_or_sound(data):
    try:
        told = decode(data)
    except ToldError:
        return
    assert all(count >= 0 for share in told.shares.values() for count in share)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"sequence": True, "instances": {}},
        {"sequence": 1, "instances": []},
        {"sequence": 1, "instances": {"p0": [1, 1]}},
        {"sequence": 1, "instances": {"p0": [1, 1, -1]}},
        {"sequence": 1, "instances": {"p0": [1, 1, 1.5]}},
        {"sequence": 1, "instances": {"p0": [1, 1, 10**12]}},
        {"sequence": 1, "instances": {"p" * 300: [1, 1, 1]}},
        {"sequence": 1, "instances": {f"p{i}": [1, 1, 1] for i in range(2001)}},
    ],
)
def test_what_is_not_of_the_form_is_refused(document):
    with pytest.raises(ToldError):
        decode(orjson.dumps(document))


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
