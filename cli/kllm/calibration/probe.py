"""Measures steps of a running engine through its OpenAI endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kllm.bench.client import Client
from kllm.bench.exceptions import BenchError
from kllm.bench.plan import Planned
from kllm.bench.prompts import Calibration, Prompts
from kllm.bench.row import Row, Status
from kllm.calibration.fit import DecodePoint, PrefillPoint

_SHORT_ANSWER = 2
"""Tokens of an answer when only the prompt counts; a single one may have no text that shows when it came."""
_LEAST_PIECES = 4
"""Of each answer while all of a batch are generated; fewer tell no mean time."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: tokens of prompts.
        batches: answers that are generated together.
        answer_tokens: of each.
        repeats: of each measurement; the median counts.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    answer_tokens: int
    repeats: int

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths of the prompts of batches: the shortest, and one in the middle, so that long batches still fit."""
        ordered = sorted(set(self.lengths))
        return tuple(dict.fromkeys((ordered[0], ordered[len(ordered) // 2])))


class Probe:
    """Measures one engine, or one prefill and one decode engine behind a router.

    Args:
        client: open.
        seed: of the prompts, each of which is like no other, so that no cache spares any of it.
        tell: hears of each measurement; must not wait or raise.

    Attributes:
        prefill: what was measured so far.
        decode: the same.
    """

    def __init__(self, client: Client, *, seed: int, tell: Callable[[str], None]) -> None:
        self.prefill: list[PrefillPoint] = []
        self.decode: list[DecodePoint] = []
        self._client, self._seed, self._tell = client, seed, tell
        self._prompts = Prompts(Calibration.guess(), seed=seed)
        self._asked = 0

    async def run(self, plan: Plan) -> None:
        """Measure all of a plan; what is measured is kept when this is cancelled.

        What the engine cannot do, a prompt that is too long for instance, is told and left out, with all that is more
        than that.

        Raises:
            BenchError: the server does not answer.
        """
        await self._client.find_model()
        counted = await self._client.calibrate(np.random.default_rng([self._seed, 0]))
        if not counted.is_measured:
            self._tell("the server does not tell how many tokens it counts; lengths are a guess")
        self._prompts = Prompts(counted, seed=self._seed)
        # The first one opens connections, and may compile what later ones use.
        await self._ask([plan.lengths[0]] * max(plan.batches), _SHORT_ANSWER)
        await self._series("prompts", plan.lengths, lambda length: self._measure_prompt(length, plan.repeats))
        for context in plan.contexts:
            await self._series("batches", plan.batches, partial(self._measure_batch, context, plan))

    async def _series(self, what: str, numbers: Sequence[int], measure: Callable[[int], Awaitable[None]]) -> None:
        """Measure in ascending order, until one cannot be."""
        for place, number in enumerate(numbers):
            try:
                await measure(number)
            except BenchError as error:
                self._tell(f"left out: {what} of {', '.join(map(str, numbers[place:]))}: {error}")
                return

    async def _measure_prompt(self, length: int, repeats: int) -> None:
        point = await self._prompt(length, repeats)
        self.prefill.append(point)
        self._tell(f"prefill  {point.tokens:>7} tokens  {point.seconds * 1000:>9.1f} ms")

    async def _measure_batch(self, context: int, plan: Plan, batch: int) -> None:
        step = await self._batch(context, batch, plan)
        self.decode.append(step)
        told = f"{step.kv_tokens:>7} KV tokens  {step.seconds * 1000:>9.2f} ms"
        self._tell(f"decode   batch {step.batch:<4} {told}")

    async def _prompt(self, length: int, repeats: int) -> PrefillPoint:
        rows = [row for _ in range(repeats) for row in await self._ask([length], _SHORT_ANSWER)]
        # A router of kLLM tells what the prefill instance says, without the way there, the transfer and the way back.
        told = [row.stages.get("prefill", row.ttft) for row in rows]
        seconds = float(np.median([each for each in told if each is not None]))
        return PrefillPoint(round(float(np.median([_prompt_tokens(row) for row in rows]))), seconds)

    async def _batch(self, context: int, batch: int, plan: Plan) -> DecodePoint:
        points = [steady(await self._ask([context] * batch, plan.answer_tokens)) for _ in range(plan.repeats)]
        return sorted(points, key=lambda point: point.seconds)[len(points) // 2]

    async def _ask(self, lengths: Sequence[int], answer_tokens: int) -> list[Row]:
        """Ask for as many answers at once."""
        clock = asyncio.get_running_loop().time
        rows = []
        bodies = []
        for length in lengths:
            planned = Planned(self._asked, 0.0, length, answer_tokens)
            self._asked += 1
            rows.append(Row(planned.index, 0.0, length, answer_tokens, keeps_times=True))
            bodies.append(self._client.body(self._prompts.prompt(planned), output_tokens=answer_tokens))
        await asyncio.gather(*(self._client.ask(body, row, clock) for body, row in zip(bodies, rows, strict=True)))
        for row in rows:
            if row.status is not Status.OK:
                raise BenchError(f"a request of {row.input_tokens} tokens failed: {row.error}: {row.message}")
        return rows


def steady(rows: Sequence[Row]) -> DecodePoint:
    """The step time while all answers of a batch were being generated.

    Raises:
        BenchError: they were not all generated at the same time for long enough.
    """
    begin, end = max(row.times[0] for row in rows), min(row.times[-1] for row in rows)
    tokens, kv = [], 0.0
    for row in rows:
        per_piece = (row.completion_tokens or len(row.times)) / len(row.times)
        pieces = [at for at in row.times if begin < at <= end]
        if len(pieces) < _LEAST_PIECES:
            raise BenchError(
                f"answers of a batch of {len(rows)} were hardly generated at the same time, as if the engine had "
                "room for fewer; ask for longer answers with --answer-tokens, or for smaller --batches"
            )
        tokens.append(len(pieces) * per_piece)
        before = sum(at <= begin for at in row.times) * per_piece
        kv += _prompt_tokens(row) + before + tokens[-1] / 2
    return DecodePoint(len(rows), round(kv), (end - begin) / float(np.mean(tokens)))


def _prompt_tokens(row: Row) -> int:
    return row.input_tokens if row.prompt_tokens is None else row.prompt_tokens
