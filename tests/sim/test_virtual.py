"""The event loop in simulated time."""

import asyncio

import pytest

from kllm.sim.agenda import Agenda
from kllm.sim.virtual import NothingHappensError, run_virtually


def run(work):
    """Run `work(agenda, heard)` and give back what was heard, with the times."""
    agenda, heard = Agenda(), []

    def hear(what):
        heard.append((agenda.now, what))

    run_virtually(work(agenda, hear), agenda)
    return heard


def test_timers_and_calls_come_in_the_order_of_their_times():
    async def work(agenda, hear):
        for at in (1.0, 2.5, 4.0):
            agenda.at(at, lambda at=at: hear(f"call {at}"))
        for _ in range(3):
            await asyncio.sleep(1.5)
            hear("timer")

    assert run(work) == [
        (1.0, "call 1.0"),
        (1.5, "timer"),
        (2.5, "call 2.5"),
        (3.0, "timer"),
        (4.0, "call 4.0"),
        (4.5, "timer"),
    ]


def test_what_a_call_wakes_goes_on_at_that_moment():
    async def work(agenda, hear):
        event = asyncio.Event()
        agenda.at(7.0, event.set)
        agenda.at(7.0, lambda: hear("later call"))
        await event.wait()
        hear("woken")
        assert asyncio.get_running_loop().time() == 7.0
        await asyncio.sleep(1)

    assert run(work) == [(7.0, "woken"), (7.0, "later call")]


def test_time_outs_pass_without_waiting():
    async def work(agenda, hear):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400 * 30):
                await asyncio.Event().wait()
        hear("timed out")

    assert run(work) == [(pytest.approx(86_400 * 30), "timed out")]


def test_a_task_that_nothing_will_wake_is_an_error():
    async def work(agenda, hear):
        await asyncio.Event().wait()

    with pytest.raises(NothingHappensError):
        run(work)


def test_what_was_called_off_does_not_happen():
    agenda, heard = Agenda(), []
    entry = agenda.at(1.0, lambda: heard.append("first"))
    agenda.at(2.0, lambda: heard.append("second"))
    entry.cancel()
    assert agenda.next_at == 2.0
    agenda.step()
    assert (heard, agenda.next_at, agenda.events) == (["second"], None, 1)
