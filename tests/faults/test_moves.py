"""Requests go on while instances under them are drained, stopped and made to serve the other role."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest
from engines.service_under_test import manifest
from faults.gated_fleet import until
from faults.request import Answer, ask, body, judge, prompt

from kllm.cache import cache_directory
from kllm_core.kinds.service import InferenceService
from kllm_core.objectives import Role
from kllm_operator.substrate.processes import ProcessSubstrate
from kllm_operator.substrate.programs import RouterAddress

pytestmark = [pytest.mark.engines, pytest.mark.timeout(580)]

ROUNDS = int(os.environ.get("KLLM_MOVES", "4"))
"""One of each move; more, each with another state to begin with, in `make faults`."""

IN_FLIGHT = 50
DRAIN_SECONDS = 60.0
REQUEST_SECONDS = 90.0
KINDS_OF_REQUEST = [body(prompt(1000 + seed, 40 + 30 * seed), tokens=24 + 8 * seed) for seed in range(8)]
ENGINE_ARGS = {"context-length": 4096, "chunked-prefill-size": 256, "max-running-requests": 32}


class Moving:
    """A fleet of processes, and the moves that tests make on it."""

    def __init__(self, substrate: ProcessSubstrate, url: str) -> None:
        self.url = url
        self._substrate = substrate

    async def replace(self, role: Role) -> None:
        """Start an instance of a role, then drain and stop the oldest one."""
        oldest = await self._oldest(role)
        await self._serving(await self._substrate.start(role))
        assert await self._substrate.drain(oldest, deadline_seconds=DRAIN_SECONDS), f"{oldest} did not drain"
        await self._substrate.stop(oldest)

    async def flip(self, role: Role) -> None:
        """Drain the oldest instance of a role and let it serve the other one."""
        oldest = await self._oldest(role)
        assert await self._substrate.drain(oldest, deadline_seconds=DRAIN_SECONDS), f"{oldest} did not drain"
        await self._substrate.flip(oldest, role.other)
        await self._known(oldest)

    async def _oldest(self, role: Role) -> str:
        there = [item for item in await self._substrate.observe() if item.role is role]
        return max(there, key=lambda item: item.age_seconds).id

    async def _serving(self, instance_id: str) -> None:
        await self._substrate.serving(instance_id)
        await self._known(instance_id)

    async def _known(self, instance_id: str) -> None:
        """Wait until the router sees it serve."""

        async def seen() -> bool:
            async with httpx2.AsyncClient(timeout=10) as client:
                told = (await client.get(f"{self.url}/kllm/v1/status")).json()["instances"]
            return any(item["id"] == instance_id and item["state"] == "Serving" for item in told)

        await until(seen, seconds=30, what=lambda: f"{instance_id} in the router")


@pytest.fixture(scope="module")
async def moving() -> AsyncIterator[Moving]:
    document = manifest(name="moves", uri="demo://tiny-random-llama", replicas=2, engine_args=ENGINE_ARGS)
    with tempfile.TemporaryDirectory(prefix="kllm-m-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        async with ProcessSubstrate(InferenceService.model_validate(document)) as substrate:
            substrate.preload()
            await substrate.resolve_model(cache_directory(None))
            ids = [await substrate.start(role) for role in Role for _ in range(2)]
            url, *_ = await asyncio.gather(
                substrate.start_router(RouterAddress(port=0)), *(substrate.serving(name) for name in ids)
            )
            fleet = Moving(substrate, url)
            for name in ids:
                await fleet._known(name)
            yield fleet


async def failures(moving: Moving, expected: list[Answer], move: Callable[[], Awaitable[None]]) -> list[str]:
    """Keep so many requests in flight during a move; returns what went wrong with any."""
    wrong: list[str] = []
    over = asyncio.Event()
    numbers = itertools.count()

    async def client() -> None:
        while not over.is_set():
            kind = next(numbers) % len(KINDS_OF_REQUEST)
            answer = await ask(moving.url, KINDS_OF_REQUEST[kind], seconds=REQUEST_SECONDS)
            outcome, message = judge(answer, expected[kind])
            if message:
                wrong.append(f"{outcome}: {message}")

    clients = [asyncio.ensure_future(client()) for _ in range(IN_FLIGHT)]
    try:
        await move()
    finally:
        over.set()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    return wrong + [f"{error!r}" for error in ended if isinstance(error, BaseException)]


async def test_no_request_fails_while_instances_are_replaced_and_change_their_role(moving: Moving):
    expected = [await ask(moving.url, request, seconds=REQUEST_SECONDS) for request in KINDS_OF_REQUEST]
    moves: list[Callable[[], Awaitable[None]]] = [
        lambda: moving.replace(Role.PREFILL),
        lambda: moving.replace(Role.DECODE),
        lambda: moving.flip(Role.DECODE),
        lambda: moving.flip(Role.PREFILL),
    ]

    for number in range(ROUNDS):
        assert await failures(moving, expected, moves[number % len(moves)]) == [], f"round {number}"
