"""Streamed greedy completions of token ids, one after another or several at once, and what they took."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass, field

import httpx2


@dataclass(frozen=True)
class Endpoint:
    """Where to ask: a router, or a plain SGLang server with its key."""

    url: str
    model: str
    token: str | None = None

    def client(self) -> httpx2.AsyncClient:
        headers = {"x-kllm-timing": "1"}
        if self.token is not None:
            headers = {"authorization": f"Bearer {self.token}"}
        return httpx2.AsyncClient(base_url=self.url, timeout=120, headers=headers)


@dataclass
class Answer:
    """One answer; times in seconds from the request."""

    prompt_tokens: int
    text: str = ""
    ttft: float = 0.0
    tpot: float = 0.0
    total: float = 0.0
    tokens: int = 0
    stages: dict[str, float] = field(default_factory=dict)


def prompt(tokens: int, *, seed: int, vocabulary: int) -> list[int]:
    """Random ids: no two prompts share a prefix, so that nothing comes from a cache."""
    rng = random.Random(f"{seed}/{tokens}")
    return [rng.randrange(100, vocabulary) for _ in range(tokens)]


async def ask(client: httpx2.AsyncClient, model: str, ids: list[int], tokens: int) -> Answer:
    body = {
        "model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = Answer(len(ids))
    began = time.monotonic()
    first = last = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if line.startswith(": kllm "):
                answer.stages = json.loads(line.removeprefix(": kllm "))
            elif line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("choices"):
                    first = first or time.monotonic()
                    last = time.monotonic()
                    answer.text += event["choices"][0]["text"]
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
    answer.ttft, answer.total = first - began, time.monotonic() - began
    answer.tpot = (last - first) / max(1, answer.tokens - 1)
    return answer


async def first_answer(endpoint: Endpoint, ids: list[int], *, seconds: float = 300) -> float:
    """Ask again and again until an answer comes; seconds from now."""
    began = time.monotonic()
    async with endpoint.client() as client:
        while True:
            try:
                await ask(client, endpoint.model, ids, 8)
            except (httpx2.HTTPError, RuntimeError):
                if time.monotonic() - began > seconds:
                    raise
                await asyncio.sleep(0.02)
            else:
                return time.monotonic() - began


async def texts(endpoint: Endpoint, prompts: list[list[int]], tokens: int) -> list[Answer]:
    """One after another."""
    async with endpoint.client() as client:
        return [await ask(client, endpoint.model, ids, tokens) for ids in prompts]


async def load(endpoint: Endpoint, prompts: list[list[int]], tokens: int, *, at_once: int) -> dict:
    """So many always in flight, until all prompts are answered."""
    left = list(enumerate(prompts))
    answers: list[Answer] = []

    async with endpoint.client() as client:

        async def worker() -> None:
            while left:
                _, ids = left.pop()
                answers.append(await ask(client, endpoint.model, ids, tokens))

        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        seconds = time.monotonic() - began
    return {
        "at_once": at_once,
        "requests": len(answers),
        "prompt_tokens": len(prompts[0]),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "ttft_ms": spread([answer.ttft * 1000 for answer in answers]),
        "tpot_ms": spread([answer.tpot * 1000 for answer in answers]),
        "stages_ms": stages(answers),
        "rows": [{name: value for name, value in asdict(answer).items() if name != "text"} for answer in answers],
    }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p90": round(ordered[math.ceil(0.9 * len(ordered)) - 1], 3),
        "max": round(ordered[-1], 3),
    }


def stages(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Medians of what the router tells of each request."""
    names = sorted({name for answer in answers for name in answer.stages})
    told = {name: [answer.stages[name] for answer in answers if name in answer.stages] for name in names}
    return {name: spread([value * 1000 for value in values]) for name, values in told.items() if _numbers(values)}


def _numbers(values: list) -> bool:
    return all(isinstance(value, int | float) for value in values)
