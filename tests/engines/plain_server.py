"""A plain SGLang server, without disaggregation, from the service's own zygote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from service_under_test import Service, free_port

from kllm_core.objectives import Role
from kllm_engine.pace import Pace
from kllm_engine.sglang.arguments import EngineSettings, launch
from kllm_engine.start.client import ZygoteClient

_DISAGGREGATED = ("--disaggregation", "--optimistic-prefill", "--kv-events")


@dataclass(frozen=True)
class PlainServer:
    """The reference that prefill plus decode must equal."""

    url: str
    token: str

    async def generate(self, input_ids: list[int], max_new_tokens: int) -> list[int]:
        """Greedy output of a prompt."""
        body = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        return list((await self.post("/generate", body))["output_ids"])

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Any call."""
        async with httpx2.AsyncClient(timeout=120) as client:
            headers = {"authorization": f"Bearer {self.token}"}
            answer = await client.post(self.url + path, json=body, headers=headers)
            return dict(answer.raise_for_status().json())


@asynccontextmanager
async def plain_server(
    service: Service, *, context_tokens: int, pace: Pace | None = None, engine_args: dict[str, Any] | None = None
) -> AsyncIterator[PlainServer]:
    """One beside a service."""
    async with plain_server_in(
        service.run, model=model_path(service), token=service.token, context_tokens=context_tokens, pace=pace,
        engine_args=engine_args,
    ) as server:  # fmt: skip
        yield server


@asynccontextmanager
async def plain_server_in(
    run: Path, *, model: Path, token: str, context_tokens: int, pace: Pace | None = None,
    engine_args: dict[str, Any] | None = None,
) -> AsyncIterator[PlainServer]:  # fmt: skip
    """Fork it from the zygote of a run directory, wait until it is ready, and end it with the context."""
    port = free_port()
    settings = EngineSettings(
        role=Role.PREFILL, model_path=model, model_name="test-model", http_port=port,
        bootstrap_port=free_port(), distributed_port=free_port(), device="cpu", api_key=token,
        context_tokens=context_tokens, pace=pace, engine_args=engine_args or {},
    )  # fmt: skip
    started = launch(settings)
    server = await ZygoteClient(run / "zygote.sock").fork(
        name="plain", args=without_disaggregation(started.arguments), env=started.environment,
        log=run / "logs" / "plain.log",
    )  # fmt: skip
    try:
        await _ready(f"http://127.0.0.1:{port}", server.wait_exit())
        yield PlainServer(f"http://127.0.0.1:{port}", token)
    finally:
        await server.kill()
        await server.wait_exit()
        await server.close()


def model_path(service: Service) -> Path:
    """The folder that the service's router was given."""
    arguments = Path(f"/proc/{service.pids()['router-0']}/cmdline").read_text().split("\0")
    flag = next(name for name in ("--tokenizer", "--model") if name in arguments)
    return Path(arguments[arguments.index(flag) + 1])


def without_disaggregation(arguments: tuple[str, ...]) -> list[str]:
    """The same server in one piece."""
    kept: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            keeping = not argument.startswith(_DISAGGREGATED)
        if keeping:
            kept.append(argument)
    return kept


async def _ready(url: str, exited: Any) -> None:
    ended = asyncio.ensure_future(exited)
    try:
        async with asyncio.timeout(120), httpx2.AsyncClient(timeout=5) as client:
            while not ended.done():
                try:
                    if (await client.get(f"{url}/ready")).status_code == 200:
                        return
                except httpx2.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise AssertionError(f"the plain server ended with {ended.result()}")
    finally:
        ended.cancel()
