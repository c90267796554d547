"""One streamed request, and what its client saw."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
from faults.cells import Outcome
from faults.gated_fleet import MODEL_NAME

PROMPT_TOKENS = 500
OUTPUT_TOKENS = 64
_TLS = ssl.create_default_context()
"""Unused, but each client would make one of its own, which costs more than the request."""
_PLAIN_TOKENS = (10, 500)
"""Range of ids without special ones; the tiny model has 512."""


@dataclass
class Answer:
    """What came.

    Attributes:
        ended: time of the end, on the monotonic clock.
    """

    status: int = 0
    text: str = ""
    usage: dict[str, Any] | None = None
    finish_reasons: list[str] = field(default_factory=list)
    done: int = 0
    ids: set[str] = field(default_factory=set)
    error: str = ""
    broken: str = ""
    began: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the request to the end."""
        return self.ended - self.began


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that no other seed begins with, so that no cache helps."""
    rng = random.Random(seed)
    return [rng.randrange(*_PLAIN_TOKENS) for _ in range(length)]


def body(ids: list[int], *, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """A greedy completion, streamed."""
    return {
        "model": MODEL_NAME, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def ask(url: str, request: dict[str, Any], *, seconds: float, answer: Answer | None = None) -> Answer:
    """Send it and read to the end, into `answer` if one is given; no end in time raises TimeoutError."""
    answer = Answer() if answer is None else answer
    answer.began = time.monotonic()
    try:
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(base_url=url, timeout=None, verify=_TLS) as client,
            client.stream("POST", "/v1/completions", json=request) as response,
        ):
            answer.status = response.status_code
            if response.status_code == 200:
                async for line in response.aiter_lines():
                    _read(answer, line)
            else:
                answer.error = (await response.aread()).decode(errors="replace")
    except httpx2.HTTPError as error:
        answer.broken = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    return answer


def judge(answer: Answer, expected: Answer) -> tuple[Outcome, str]:
    """What a client saw, and what is wrong with it."""
    if answer.status == 503:
        return Outcome.UNAVAILABLE, answer.error
    if answer.status != 200:
        return Outcome.OTHER, f"status {answer.status}: {answer.error or answer.broken}"
    if answer.error:
        told = expected.text.startswith(answer.text)
        return (Outcome.STREAM_ERROR, answer.error) if told else (Outcome.WRONG, "the text before the error differs")
    if answer.broken:
        return Outcome.OTHER, answer.broken
    for name in ("text", "usage", "finish_reasons", "done"):
        ours, theirs = getattr(answer, name), getattr(expected, name)
        if name == "usage":
            ours, theirs = _counts(ours), _counts(theirs)
        if ours != theirs:
            return Outcome.WRONG, f"{name}: {ours!r} instead of {theirs!r}"
    if len(answer.ids) != 1:
        return Outcome.WRONG, f"chunks have the ids {sorted(answer.ids)}"
    return Outcome.SUCCESS, ""


def _counts(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Token counts; how much of the prompt was cached may differ."""
    return {name: value for name, value in (usage or {}).items() if name.endswith("_tokens")}


def _read(answer: Answer, line: str) -> None:
    if not line.startswith("data:"):
        return
    data = line[5:].strip()
    if data == "[DONE]":
        answer.done += 1
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = data
        return
    answer.ids.add(chunk["id"])
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        answer.text += choice["text"]
        if choice.get("finish_reason"):
            answer.finish_reasons.append(choice["finish_reason"])
