"""Many pieces of work begin a few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop.virtual_time import run_virtually

from kllm_operator.service.turns import Turns


@given(pieces=st.integers(1, 60), at_once=st.integers(1, 7))
def test_in_each_turn_of_the_event_loop_no_more_begin_than_may_and_in_order(pieces, at_once):
    async def work():
        turns, begun, round_of_loop = Turns(at_once), [], [0]

        async def piece(number):
            await turns.wait()
            begun.append((number, round_of_loop[0]))

        tasks = [asyncio.create_task(piece(number)) for number in range(pieces)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            round_of_loop[0] += 1
        assert [number for number, _ in begun] == list(range(pieces))
        assert max(Counter(when for _, when in begun).values()) <= at_once
        # Nothing is lost between them.
        assert round_of_loop[0] <= pieces / at_once + 4

    run_virtually(work())


async def test_who_gives_up_waiting_costs_nobody_a_turn():
    turns = Turns(1)
    given_up = asyncio.create_task(turns.wait())
    other = asyncio.create_task(turns.wait())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait_for(other, 5)
    assert given_up.cancelled()
    await asyncio.wait_for(turns.wait(), 5)


def test_there_must_be_a_turn_for_somebody():
    with pytest.raises(ValueError, match="at_once must be at least 1"):
        Turns(0)
