"""Whether an agent is silent, or the router was held up itself."""

import asyncio
import threading
import time

import pytest

from kllm_router.proxy.agent_client import next_message

SILENCE = 0.2


class Stream:
    """One message, which comes a while after it is asked for, whatever the reader does meanwhile."""

    def __init__(self, after_seconds):
        self._after_seconds = after_seconds

    async def read(self):
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        timer = threading.Timer(self._after_seconds, lambda: loop.call_soon_threadsafe(came.set))
        timer.start()
        try:
            await came.wait()
            # As with gRPC, whose poller hands it over in its own time.
            await asyncio.sleep(0.01)
        finally:
            timer.cancel()
        return "report"


async def test_a_stream_on_which_nothing_comes_is_silent():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await next_message(Stream(after_seconds=30), silence_seconds=SILENCE)
    assert SILENCE <= time.monotonic() - began < 10 * SILENCE


async def test_what_came_while_the_reader_was_held_up_is_read():
    asyncio.get_running_loop().call_later(0.1, time.sleep, 3 * SILENCE)
    assert await next_message(Stream(after_seconds=0.15), silence_seconds=SILENCE) == "report"


async def test_the_end_of_a_read_is_the_end_of_its_task():
    reading = asyncio.create_task(next_message(Stream(after_seconds=30), silence_seconds=30))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
