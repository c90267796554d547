"""The fault tests' own judgement: what counts as a right answer, and how results are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from faults.cells import Cell, Fault, Outcome, Result, Stage, matrix
from faults.matrix import merge, table
from faults.proxies import HttpProxy
from faults.request import Answer, judge

from kllm_core.objectives import Role

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
GOOD = Answer(status=200, text="ab", usage=USAGE, finish_reasons=["length"], done=1, ids={"x"})


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.SUCCESS),
        ({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}}, Outcome.SUCCESS),
        ({"text": "a"}, Outcome.WRONG),
        ({"text": "aab"}, Outcome.WRONG),
        ({"usage": USAGE | {"completion_tokens": 3}}, Outcome.WRONG),
        ({"usage": None}, Outcome.WRONG),
        ({"finish_reasons": []}, Outcome.WRONG),
        ({"done": 2}, Outcome.WRONG),
        ({"ids": {"x", "y"}}, Outcome.WRONG),
        ({"broken": "ReadError"}, Outcome.OTHER),
        ({"text": "a", "error": "{}"}, Outcome.STREAM_ERROR),
        ({"text": "c", "error": "{}"}, Outcome.WRONG),
        ({"status": 503, "error": "{}"}, Outcome.UNAVAILABLE),
        ({"status": 500, "error": "{}"}, Outcome.OTHER),
    ],
)
def test_an_answer_is_right_only_if_nothing_is_missing_doubled_or_different(changes, outcome):
    assert judge(replace(GOOD, **changes), GOOD)[0] is outcome


def result(outcome: Outcome, *, pairs: int = 2, stage: Stage = Stage.QUEUE, **changes) -> Result:
    values = {"seconds": 1.0, "undisturbed_seconds": 0.2, "idle_seconds": 0.1} | changes
    return Result(Cell(Fault.KILL, stage, Role.PREFILL, pairs), outcome, **values)


def test_with_another_instance_only_success_passes():
    assert result(Outcome.SUCCESS, seconds=30.0).passed
    assert not result(Outcome.UNAVAILABLE).passed
    assert not result(Outcome.SUCCESS, idle_seconds=None).passed


def test_without_another_instance_the_client_must_be_told_in_time():
    assert result(Outcome.UNAVAILABLE, pairs=1).passed
    assert not result(Outcome.UNAVAILABLE, pairs=1, seconds=5.1).passed
    assert not result(Outcome.STREAM_ERROR, pairs=1).passed
    assert result(Outcome.STREAM_ERROR, pairs=1, stage=Stage.STREAMING).passed
    assert not result(Outcome.HUNG, pairs=1).passed


def test_the_matrix_has_each_fault_at_each_stage_on_each_role_once():
    assert len(set(matrix(2))) == len(matrix(2)) == len(Fault) * len(Stage) * len(Role)


def test_a_new_row_takes_the_place_of_the_old_one_and_failures_stand_out():
    cell = Cell(Fault.KILL, Stage.QUEUE, Role.PREFILL, 2)
    row = {"cell": str(cell), "pairs": 2, "outcome": "unavailable", "seconds": 1.0, "passed": False}

    rows = merge([row | {"outcome": "hung"}], [row])

    assert rows == [row]
    assert "2P2D: 0 of 1 as they must be" in table(rows)
    assert "**503 1.0 s**" in table(rows)


async def test_a_proxy_resets_swallows_and_passes_on():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = HttpProxy("127.0.0.1", server.sockets[0].getsockname()[1])
    await proxy.start()
    host, _, port = proxy.address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        proxy.passing.clear()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        proxy.passing.set()
        assert await reader.readexactly(3) == b"two"

        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()
    finally:
        await proxy.stop()
        server.close()
