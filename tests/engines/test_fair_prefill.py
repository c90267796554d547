"""Long prompts that give way to short ones yield what they would yield alone, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx2
import pytest
from asking import generate, prompt
from conftest import CHUNK
from plain_server import PlainServer, plain_server
from service_under_test import Service

from kllm_engine.pace import parse_pace

pytestmark = pytest.mark.engines

TOKENS = 8
SIZES = (1500, 20, 700, 64, 33, 1100, 5, 257, 90, 600, 12, 40, 1700, 128, 8, 300, 50, 25, 900, 70)
"""Long ones among short ones; a chunk has 256."""


@pytest.mark.parametrize("binding", ["late", "early", "both"])
async def test_long_and_short_prompts_at_once_yield_what_a_plain_server_yields_one_by_one(
    binding, early_router: str, service: Service, plain: PlainServer, idle_afterwards
):
    prompts = [prompt(size, seed=200 + n) for n, size in enumerate(SIZES)]
    references = [await plain.generate(ids, TOKENS) for ids in prompts]
    targets = {"late": [service.grpc], "early": [early_router], "both": [service.grpc, early_router]}[binding]

    asked = (generate(targets[n % len(targets)], ids, TOKENS) for n, ids in enumerate(prompts))
    answers = [output for output, _ in await asyncio.gather(*asked)]

    assert answers == references


async def test_clients_that_leave_in_any_state_leave_nothing_behind(
    early_router: str, service: Service, plain: PlainServer, idle_afterwards
):
    rng = random.Random(7)
    for round_ in range(3):
        prompts = [prompt(size, seed=1000 * round_ + n) for n, size in enumerate(SIZES)]
        tasks = [
            asyncio.create_task(generate(early_router if n % 3 == 0 else service.grpc, ids, TOKENS))
            for n, ids in enumerate(prompts)
        ]
        leaving = rng.sample(range(len(tasks)), 10)
        for number in leaving:
            await asyncio.wait({tasks[number]}, timeout=rng.random() * 0.1)
            tasks[number].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number in set(range(len(tasks))) - set(leaving):
            assert answers[number][0] == await plain.generate(prompts[number], TOKENS)


@pytest.fixture(scope="module")
async def paced(service: Service) -> AsyncIterator[PlainServer]:
    """A server whose steps are slow enough to say what happens between which of them."""
    pace = parse_pace("prefill=0.1")
    async with plain_server(
        service, context_tokens=4096, pace=pace, engine_args={"chunked-prefill-size": CHUNK}
    ) as server:
        yield server


async def used_tokens(server: PlainServer) -> int:
    async with httpx2.AsyncClient(timeout=10, headers={"authorization": f"Bearer {server.token}"}) as client:
        return (await client.get(f"{server.url}/v1/loads")).json()["loads"][0]["num_used_tokens"]


async def until_used(server: PlainServer, low: int, high: int) -> None:
    """Wait until the server holds KV of so many tokens."""
    for _ in range(1000):
        if low <= await used_tokens(server) <= high:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it does not hold {low} to {high} tokens, but {await used_tokens(server)}")


async def ask(server: PlainServer, ids: list[int], name: str, done: list[str]) -> list[int]:
    body = {
        "input_ids": ids, "rid": name, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    }  # fmt: skip
    answer = await server.post("/generate", body)
    done.append(name)
    return [answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]]


async def test_a_short_prompt_does_not_wait_for_a_long_one(paced: PlainServer, plain: PlainServer):
    long, shorts = prompt(8 * CHUNK, seed=1), [prompt(30, seed=10 + n) for n in range(3)]
    done: list[str] = []
    running = asyncio.create_task(ask(paced, long, "long", done))
    await until_used(paced, 1, 4 * CHUNK)

    answers = await asyncio.gather(*(ask(paced, ids, f"short{n}", done) for n, ids in enumerate(shorts)))

    assert "long" not in done
    assert (await running)[0] == await plain.generate(long, 1)
    assert [answer[0] for answer in answers] == [await plain.generate(ids, 1) for ids in shorts]


async def test_a_much_shorter_one_overtakes_a_long_one_that_is_aborted_while_it_is_set_aside(
    paced: PlainServer, plain: PlainServer
):
    long, shorter = prompt(12 * CHUNK, seed=2), prompt(3 * CHUNK, seed=3)
    done: list[str] = []
    aside = asyncio.create_task(ask(paced, long, "aside", done))
    await until_used(paced, 1, 4 * CHUNK)
    before = await used_tokens(paced)
    overtaking = asyncio.create_task(ask(paced, shorter, "overtaking", done))
    # The first chunk may be the long one's, if it was about to be computed.
    await until_used(paced, before + 2 * CHUNK, 20 * CHUNK)
    async with httpx2.AsyncClient(timeout=10, headers={"authorization": f"Bearer {paced.token}"}) as client:
        await client.post(f"{paced.url}/abort_request", json={"rid": "aside"})

    assert (await aside)[1] == "abort"
    assert done == ["aside"]
    assert (await overtaking)[0] == await plain.generate(shorter, 1)
    await until_used(paced, 0, 0)


async def test_what_was_set_aside_goes_on_from_where_it_was(paced: PlainServer, plain: PlainServer):
    long, shorter = prompt(12 * CHUNK, seed=4), prompt(3 * CHUNK, seed=5)
    done: list[str] = []
    aside = asyncio.create_task(ask(paced, long, "aside", done))
    await until_used(paced, 1, 4 * CHUNK)
    overtaking = asyncio.create_task(ask(paced, shorter, "overtaking", done))

    assert (await overtaking)[0] == await plain.generate(shorter, 1)
    assert (await aside)[0] == await plain.generate(long, 1)
    assert done == ["overtaking", "aside"]
    await until_used(paced, 0, 0)
