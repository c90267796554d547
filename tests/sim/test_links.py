"""The way of KV: how long it takes alone and with others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kllm.sim.agenda import Agenda
from kllm.sim.links import Links
from kllm.sim.scenario import Link

PER_TOKEN = 1e-3


def sent(transfers, *, base=0.0, shared=True, called_off=()):
    """Begin transfers (moment, ends, tokens); returns when each was there, by its number."""
    agenda, there = Agenda(), {}
    links = Links(agenda, Link(base, PER_TOKEN, shared))

    def begin(number, ends, tokens):
        made = links.send(ends, tokens, lambda: there.setdefault(number, agenda.now))
        for which, at in called_off:
            if which == number:
                agenda.at(at, lambda: links.call_off(made))

    for number, (at, ends, tokens) in enumerate(transfers):
        agenda.at(at, lambda number=number, ends=ends, tokens=tokens: begin(number, ends, tokens))
    while agenda.next_at is not None:
        agenda.step()
    return there


def test_alone_it_takes_the_base_and_its_tokens():
    assert sent([(1.0, ("p", "d"), 500)], base=0.1) == {0: pytest.approx(1.0 + 0.1 + 0.5)}


def test_two_on_one_link_have_half_of_it_each():
    there = sent([(0.0, ("p", "d1"), 1000), (0.5, ("p", "d2"), 1000)])
    # Half a second alone, then both at half until the first has its 1,000, then the second alone.
    assert there == {0: pytest.approx(1.5), 1: pytest.approx(2.0)}


def test_on_links_of_their_own_they_do_not_meet():
    there = sent([(0.0, ("p1", "d1"), 1000), (0.0, ("p2", "d2"), 1000)])
    assert there == {0: pytest.approx(1.0), 1: pytest.approx(1.0)}


def test_the_busier_end_decides():
    there = sent([(0.0, ("p1", "d"), 1000), (0.0, ("p2", "d"), 1000), (0.0, ("p3", "e"), 1000)])
    assert there == {0: pytest.approx(2.0), 1: pytest.approx(2.0), 2: pytest.approx(1.0)}


def test_what_is_called_off_leaves_its_share_to_the_others():
    there = sent([(0.0, ("p", "d"), 1000), (0.0, ("p", "d"), 1000)], called_off=[(0, 1.0)])
    assert there == {1: pytest.approx(1.5)}


@given(st.lists(st.tuples(st.integers(0, 40).map(lambda n: n / 10), st.integers(1, 2000)), min_size=1, max_size=12))
def test_a_shared_link_is_never_idle_and_never_faster_than_it_is(transfers):
    there = sent([(at, ("p", f"d{number}"), tokens) for number, (at, tokens) in enumerate(transfers)])
    free = 0.0
    for at, tokens in sorted(transfers):
        free = max(free, at) + tokens * PER_TOKEN
    assert max(there.values()) == pytest.approx(free)
    assert all(there[number] >= at + tokens * PER_TOKEN - 1e-9 for number, (at, tokens) in enumerate(transfers))
