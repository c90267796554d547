"""A benchmark from the first probe to the last answer."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kllm.bench.client import Client, Target, warm_up
from kllm.bench.load import Load
from kllm.bench.machine import machine_facts
from kllm.bench.plan import Planned
from kllm.bench.progress import progress
from kllm.bench.prompts import Calibration, Prompts
from kllm.bench.report import Summary, summarize
from kllm.bench.row import Row
from kllm.bench.settings import Settings


@dataclass(frozen=True)
class Result:
    """What a benchmark found."""

    settings: Settings
    model: str
    calibration: Calibration | None
    rows: list[Row]
    summary: Summary

    @property
    def title(self) -> str:
        """What was measured."""
        endpoint = "chat" if self.settings.chat else "completions"
        return f"{self.model or 'no model'} at {self.settings.base_url} ({endpoint})"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arguments": self.settings.document(),
            "model": self.model,
            "machine": machine_facts(),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "summary": self.summary.document(),
            "requests": [row.document() for row in self.rows],
        }


class Session:
    """Runs a plan once.

    Args:
        settings: checked.
        plan: not empty.
    """

    def __init__(self, settings: Settings, plan: list[Planned]) -> None:
        self._settings = settings
        self._plan = plan
        self._stop = asyncio.Event()
        self._calibration: Calibration | None = None

    async def run(self) -> Result:
        """Measure; SIGINT and SIGTERM end it early, with what is known by then.

        Raises:
            BenchError: the server does not serve.
        """
        settings = self._settings
        target = Target(
            settings.base_url,
            model=settings.model,
            api_key=settings.api_key,
            is_chat=settings.chat,
            ignores_eos=settings.ignore_eos,
            timeout=settings.timeout,
        )
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._stop.set)
        try:
            async with Client(target) as client:
                prompts = await self._unless_stopped(self._prepare(client))
                load = Load(
                    self._plan,
                    prepare=lambda planned: _body(client, prompts, planned),
                    ask=client.ask,
                    max_in_flight=settings.max_in_flight,
                    drain=settings.timeout if settings.drain is None else settings.drain,
                )
                if prompts is not None:
                    # A full collection would look at the whole plan, which can take longer than an answer.
                    gc.freeze()
                    async with progress(load):
                        await load.run(self._stop)
                return self._result(client.model, load)
        finally:
            gc.unfreeze()
            for number in signals:
                loop.remove_signal_handler(number)

    async def _prepare(self, client: Client) -> Prompts:
        settings = self._settings
        await client.find_model()
        self._calibration = await client.calibrate(np.random.default_rng([settings.seed, 0]))
        prompts = Prompts(self._calibration, seed=settings.seed)
        for number in range(settings.warmup):
            like = self._plan[number % len(self._plan)]
            # A prompt of its own, so that the load finds nothing of it in a cache.
            planned = replace(like, index=len(self._plan) + number, blocks=())
            await warm_up(client, planned, prompts.prompt(planned))
        return prompts

    async def _unless_stopped(self, work: Coroutine[Any, Any, Prompts]) -> Prompts | None:
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    def _result(self, model: str, load: Load) -> Result:
        summary = summarize(
            load.rows,
            planned=len(self._plan),
            elapsed=load.elapsed,
            goals=self._settings.goals,
            is_interrupted=self._stop.is_set(),
        )
        return Result(self._settings, model, self._calibration, load.rows, summary)


def _body(client: Client, prompts: Prompts | None, planned: Planned) -> bytes:
    prompt = "" if prompts is None else prompts.prompt(planned)
    return client.body(prompt, output_tokens=planned.output_tokens)
