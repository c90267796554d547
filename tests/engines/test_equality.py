"""Prefill plus decode yields, token by token, what one plain server yields."""

from __future__ import annotations

import asyncio

import pytest
from asking import generate, prompt
from plain_server import PlainServer
from service_under_test import Service

pytestmark = pytest.mark.engines

TOKENS = 24


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 255, 256, 257, 600, 1500])
async def test_late_binding_yields_what_a_plain_server_yields(
    service: Service, plain: PlainServer, length, idle_afterwards
):
    ids = prompt(length, seed=1)

    output, finished = await generate(service.grpc, ids, TOKENS)

    assert output == await plain.generate(ids, TOKENS)
    assert (finished.prompt_tokens, finished.completion_tokens, finished.reason) == (length, TOKENS, "length")


async def test_a_prompt_that_is_cached_yields_the_same_again(service: Service, plain: PlainServer, idle_afterwards):
    ids = prompt(600, seed=2)
    reference = await plain.generate(ids, TOKENS)

    first, _ = await generate(service.grpc, ids, TOKENS)
    second, _ = await generate(service.grpc, ids, TOKENS)

    assert first == second == reference


async def test_all_four_pairs_of_2p2d_yield_what_a_plain_server_yields(
    service: Service, plain: PlainServer, idle_afterwards
):
    pairs: set[tuple[str, str]] = set()
    for round_ in range(12):
        prompts = [prompt(40 + 150 * n, seed=10 * round_ + n) for n in range(6)]
        references = [await plain.generate(ids, TOKENS) for ids in prompts]

        answers = await asyncio.gather(*(generate(service.grpc, ids, TOKENS) for ids in prompts))

        assert [output for output, _ in answers] == references
        pairs |= {(finished.prefill_instance, finished.decode_instance) for _, finished in answers}
        if len(pairs) == 4:
            return
    raise AssertionError(f"only these pairs were used: {pairs}")


async def test_sixteen_at_once_do_not_mix_up(service: Service, plain: PlainServer, idle_afterwards):
    prompts = [prompt(20 + 37 * n, seed=1000 + n) for n in range(16)]
    references = [await plain.generate(ids, TOKENS) for ids in prompts]

    answers = await asyncio.gather(*(generate(service.grpc, ids, TOKENS) for ids in prompts))

    assert [output for output, _ in answers] == references


async def test_early_binding_yields_what_a_plain_server_yields(
    early_router: str, service: Service, plain: PlainServer, idle_afterwards
):
    prompts = [prompt(length, seed=50 + length) for length in (1, 16, 100, 600, 1500)]
    references = [await plain.generate(ids, TOKENS) for ids in prompts]

    alone = [(await generate(early_router, ids, TOKENS))[0] for ids in prompts]
    together = await asyncio.gather(*(generate(early_router, ids, TOKENS) for ids in prompts))

    assert alone == references
    assert [output for output, _ in together] == references


async def test_bound_and_unbound_prompts_side_by_side_yield_what_a_plain_server_yields(
    early_router: str, service: Service, plain: PlainServer, idle_afterwards
):
    # Bound prompts make SGLang push unbound ones back in mid-prefill; the router then binds those at once.
    prompts = [prompt(1200 + 16 * n, seed=70 + n) for n in range(8)]
    references = [await plain.generate(ids, TOKENS) for ids in prompts]

    answers = await asyncio.gather(
        *(generate(early_router if n % 2 else service.grpc, ids, TOKENS) for n, ids in enumerate(prompts))
    )

    assert [output for output, _ in answers] == references


async def test_stages_of_a_request_add_up_to_its_time_to_first_token(service: Service, idle_afterwards):
    _, finished = await generate(service.grpc, prompt(600, seed=3), TOKENS)

    times = finished.times
    stages = times.queue + times.prefill + times.bind + times.transfer
    assert times.prefill > 0
    assert times.transfer > 0
    assert times.per_output_token > 0
    assert stages == pytest.approx(times.first_token, abs=0.05)


async def test_the_router_learns_what_prefill_has_cached(service: Service, idle_afterwards):
    ids = prompt(1600, seed=999)
    first = (await generate(service.grpc, ids, TOKENS))[1]

    # The engine tells what it has stored after the batch, so that the very next request may come too soon.
    later = [(await generate(service.grpc, ids, TOKENS))[1] for _ in range(3)]

    assert first.cached_tokens < 100
    assert later[-1].cached_tokens >= 1500
    assert later[-1].prefill_instance in {first.prefill_instance, later[0].prefill_instance}
