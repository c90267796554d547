"""Prompts that wait on one engine, and the chunks that its prefill steps compute. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kllm_core.engine_model.job import Job, Phase
from kllm_core.engine_model.pool import KvPool
from kllm_core.engine_model.spec import EngineSpec

Order = Callable[[Sequence[Job], float], Iterable[Job]]
"""Which of those that wait come first, at a moment; all of them must come."""


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
    """Jobs that wait for prefill, and the one whose prompt is computed in part.

    Args:
        spec: of the engine.
        pool: where the KV goes.
        order: who comes first; as they came if left out.
    """

    def __init__(self, spec: EngineSpec, pool: KvPool, order: Order | None = None) -> None:
        self._spec, self._pool, self._order = spec, pool, order
        self._waiting: deque[Job] = deque()
        self._chunked: Job | None = None
        self._tokens = self._uncached = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything is to be computed."""
        return bool(self._waiting) or self._chunked is not None

    @property
    def chunked(self) -> Job | None:
        """The one whose prompt is computed in part."""
        return self._chunked

    @property
    def tokens(self) -> int:
        """Prompt tokens of those that wait and the rest of the one in work."""
        return self._tokens + self._rest

    @property
    def uncached_tokens(self) -> int:
        """The same without what was cached when they came."""
        return self._uncached + self._rest

    @property
    def _rest(self) -> int:
        return 0 if self._chunked is None else self._chunked.prompt_tokens - self._chunked.computed

    def add(self, job: Job, *, first: bool = False) -> None:
        """A job waits; before all others if `first`."""
        job.phase = Phase.WAITING
        size = self._spec.block_tokens
        job.expected_cached = min(self._pool.cache.match(job.blocks).blocks * size, job.prompt_tokens - 1)
        self._tokens += job.prompt_tokens
        self._uncached += job.prompt_tokens - job.expected_cached
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """A job waits no longer; also the one in work."""
        if job is self._chunked:
            self._chunked = None
        else:
            self._waiting.remove(job)
            self._forget(job)

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
        if self._chunked is not None:
            left -= self._add(chunks, self._chunked, left)
        while left > 0 and places > 0 and not blocked and self._waiting:
            job = self._next(now)
            loaded = self._pool.begin(job, reserve=reserve)
            if loaded is None:
                break
            self._waiting.remove(job) if self._order else self._waiting.popleft()
            self._forget(job)
            job.phase, job.began_at = Phase.PREFILL, now
            host += loaded
            places -= 1
            left -= self._add(chunks, job, left)
        last = chunks[-1] if chunks else None
        self._chunked = (
            last.job if last is not None and last.before + last.new_tokens < last.job.prompt_tokens else None
        )
        return PrefillStep(tuple(chunks), tokens - left, host)

    def _next(self, now: float) -> Job:
        return self._waiting[0] if self._order is None else next(iter(self._order(self._waiting, now)))

    def _forget(self, job: Job) -> None:
        self._tokens -= job.prompt_tokens
        self._uncached -= job.prompt_tokens - job.expected_cached

    @staticmethod
    def _add(chunks: list[Chunk], job: Job, most: int) -> int:
        new = min(most, job.prompt_tokens - job.computed)
        chunks.append(Chunk(job, new, job.computed))
        return new
