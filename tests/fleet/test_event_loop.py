"""Events of gRPC come through while the loop has much else to do."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest

from kllm_operator.fleet.event_loop import PromptLoop as OperatorLoop
from kllm_router.event_loop import PromptLoop as RouterLoop

_CALLS = 1200
_NOWHERE = "127.0.0.1:9"


async def _turns_until_all_calls_end() -> int:
    """Of a loop that is busy in each, with more events than the socket that wakes it holds bytes."""
    async with grpc.aio.insecure_channel(_NOWHERE) as channel:
        method = channel.unary_unary("/kllm.Nobody/Nothing")
        calls = [asyncio.ensure_future(_fails(method)) for _ in range(_CALLS)]
        await asyncio.sleep(0)
        turns = 0
        while not all(call.done() for call in calls):
            time.sleep(0.005)  # noqa: ASYNC251  the loop is busy
            await asyncio.sleep(0)
            turns += 1
        return turns


async def _fails(method):
    with pytest.raises(grpc.aio.AioRpcError):
        await method(b"", timeout=60)


@pytest.mark.parametrize("loop", [OperatorLoop, RouterLoop])
def test_a_busy_loop_takes_all_events_that_there_are_each_turn(loop):
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(_turns_until_all_calls_end()) < 200
