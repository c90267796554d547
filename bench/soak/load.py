"""An open load of requests whose answers are known."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from faults.cells import Outcome
from faults.request import Answer, ask, body, judge, prompt

REQUEST_SECONDS = 60.0
_SHAPES = ((40, 16), (120, 24), (400, 16), (60, 96), (200, 48))
"""Prompt and output tokens; short, long prompts and long answers."""

_PROMPTS_PER_SHAPE = 4


@dataclass
class Tally:
    """What has become of the load.

    Attributes:
        wrong: messages of answers that differ from the known ones, or never came.
        failed: messages of those that were told an error.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, message: str) -> None:
        """Count one answer."""
        self.outcomes[outcome.value] += 1
        if outcome in {Outcome.WRONG, Outcome.HUNG}:
            self.wrong.append(message)
        elif outcome is not Outcome.SUCCESS:
            self.failed.append(f"{outcome}: {message}")


class KnownLoad:
    """Requests of several shapes; each is asked once in peace, and its answer is what later ones must be.

    Attributes:
        sent_per_second: mean rate that was reached; below the wanted one when the machine was too busy to send.

    Args:
        url: of the router.
        seed: of prompts and arrivals.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.tally = Tally()
        self.sent_per_second = 0.0
        self._url = url
        self._rng = random.Random(seed)
        self._requests = [
            body(prompt(seed * 1000 + number, length), tokens=tokens)
            for number, (length, tokens) in enumerate(_SHAPES * _PROMPTS_PER_SHAPE)
        ]
        self._known: list[Answer] = []

    async def learn(self) -> None:
        """Ask each once, while nothing else happens."""
        self._known = [await ask(self._url, request, seconds=REQUEST_SECONDS) for request in self._requests]
        for answer in self._known:
            if answer.status != 200 or answer.error or answer.broken:
                raise SystemExit(f"a request in peace failed: {answer}")

    async def capacity(self, *, clients: int, seconds: float) -> float:
        """Requests per second that so many clients get answered, one after the other each."""
        answered = 0
        end = time.monotonic() + seconds

        async def client() -> None:
            nonlocal answered
            while time.monotonic() < end:
                await self._one()
                answered += time.monotonic() < end

        await asyncio.gather(*(client() for _ in range(clients)))
        return answered / seconds

    async def run(self, *, rate: float, seconds: float) -> None:
        """Send for so long at a mean rate, whatever becomes of earlier ones; then wait for all."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[Any]] = set()
        at = began = loop.time()
        end = began + seconds
        sent = 0
        while (at := at + self._rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - loop.time()))
            task = asyncio.create_task(self._one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        # Where engines take all cores, this process gets too little of them to keep to its times.
        self.sent_per_second = sent / max(seconds, loop.time() - began)
        await asyncio.gather(*tasks)

    async def _one(self) -> None:
        number = self._rng.randrange(len(self._requests))
        try:
            answer = await ask(self._url, self._requests[number], seconds=REQUEST_SECONDS)
        except TimeoutError:
            self.tally.add(Outcome.HUNG, f"request {number} did not end within {REQUEST_SECONDS:g} s")
            return
        self.tally.add(*judge(answer, self._known[number]))
