"""Prompts that wait on one engine, and the chunks that its prefill steps compute. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kllm_core.engine_model.job import Job, Phase
from kllm_core.engine_model.pool import KvPool
from kllm_core.engine_model.spec import EngineSpec

Turns = Callable[[Sequence[Job], int], Iterable[tuple[Job, int]]]
"""Which prompts enter a step of so many new tokens, and with how many each at most, of all that wait or are computed in
part, in the order of their arrival."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt.

    Attributes:
        new_tokens: computed in this step.
        before: tokens whose KV they attend to.
    """

    job: Job
    new_tokens: int
    before: int


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Chunks that are computed together.

    Attributes:
        host_blocks: that are loaded from the second tier first.
    """

    chunks: tuple[Chunk, ...]
    new_tokens: int
    host_blocks: int


class PrefillQueue:
    """Jobs that wait for prefill, and those whose prompts are computed in part.

    Args:
        spec: of the engine.
        pool: where the KV goes.
        turns: who enters a step; as they came, each to its end, if left out.
    """

    def __init__(self, spec: EngineSpec, pool: KvPool, turns: Turns | None = None) -> None:
        self._spec, self._pool, self._turns = spec, pool, turns
        self._waiting: deque[Job] = deque()
        self._begun: dict[Job, None] = {}
        self._tokens = self._uncached = 0
        self._number = itertools.count()
        self._arrivals: dict[Job, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything is to be computed."""
        return bool(self._waiting or self._begun)

    @property
    def tokens(self) -> int:
        """Prompt tokens of those that wait and the rest of those that are computed in part."""
        return self._tokens + self._rest

    @property
    def uncached_tokens(self) -> int:
        """The same without what was cached when they came."""
        return self._uncached + self._rest

    @property
    def _rest(self) -> int:
        return sum(job.prompt_tokens - job.computed for job in self._begun)

    def add(self, job: Job, *, first: bool = False) -> None:
        """A job waits; before all others if `first`."""
        job.phase = Phase.WAITING
        size = self._spec.block_tokens
        job.expected_cached = min(self._pool.cache.match(job.blocks).blocks * size, job.prompt_tokens - 1)
        self._tokens += job.prompt_tokens
        self._uncached += job.prompt_tokens - job.expected_cached
        if self._turns is not None:
            self._arrivals[job] = -next(self._number) if first else next(self._number)
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """A job waits no longer."""
        self._waiting.remove(job)
        self._arrivals.pop(job, None)
        self._forget(job)

    def give_up(self, job: Job) -> None:
        """A job whose prompt is being computed gets no further chunk."""
        self._begun.pop(job, None)
        self._arrivals.pop(job, None)

    def step(self, now: float, *, tokens: int, places: int, blocked: bool, reserve: int) -> PrefillStep:
        """Form the next step; jobs that enter it take their KV.

        Args:
            now: seconds.
            tokens: most new tokens.
            places: most further jobs.
            blocked: no further job may begin.
            reserve: tokens of room that further jobs must leave.
        """
        chunks: list[Chunk] = []
        left, host = tokens, 0
        for job, most in self._entering(tokens, blocked=blocked):
            if left <= 0:
                break
            if job not in self._begun:
                loaded = self._pool.begin(job, reserve=reserve) if places > 0 else None
                if loaded is None:
                    break
                self._waiting.remove(job) if self._turns else self._waiting.popleft()
                self._forget(job)
                job.phase, job.began_at = Phase.PREFILL, now
                host += loaded
                places -= 1
            left -= self._add(chunks, job, min(left, most))
        if not chunks and self._begun:
            # Nobody could begin for want of room, which those in work give back when they end.
            left -= self._add(chunks, next(iter(self._begun)), left)
        for chunk in chunks:
            if chunk.before + chunk.new_tokens < chunk.job.prompt_tokens:
                self._begun[chunk.job] = None
            else:
                self.give_up(chunk.job)
        return PrefillStep(tuple(chunks), tokens - left, host)

    def _entering(self, tokens: int, *, blocked: bool) -> Iterator[tuple[Job, int]]:
        """Jobs that are to enter, with their most new tokens; the first one of those that wait leaves in between."""
        if self._turns is not None:
            there = [*self._begun, *(() if blocked else self._waiting)]
            yield from self._turns(sorted(there, key=self._arrivals.__getitem__), tokens)
            return
        for job in list(self._begun):
            yield job, tokens
        while self._waiting and not blocked:
            yield self._waiting[0], tokens

    def _forget(self, job: Job) -> None:
        self._tokens -= job.prompt_tokens
        self._uncached -= job.prompt_tokens - job.expected_cached

    @staticmethod
    def _add(chunks: list[Chunk], job: Job, most: int) -> int:
        new = min(most, job.prompt_tokens - job.computed)
        chunks.append(Chunk(job, new, job.computed))
        return new
