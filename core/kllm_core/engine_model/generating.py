"""The sequences that one engine decodes together. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

from kllm_core.engine_model.decoding import DecodeRun
from kllm_core.engine_model.job import Happening, Job, Kind, Phase
from kllm_core.engine_model.meter import StepMeter
from kllm_core.engine_model.pool import KvPool
from kllm_core.engine_model.spec import EngineSpec

_RETRACT_STEPS = 20
"""Decode steps that there is room for after a retraction, as in SGLang."""
_ROUNDING = 1e-6
"""Tokens within which room is enough: accept lengths are no whole numbers."""


class DecodeBatch:
    """Jobs in decode, between two changes of the batch.

    Attributes:
        ready: jobs that join at the next step.
        running: jobs in the batch.
        run: the row of steps that goes on; None: it does not decode, or together with prompts.
        meter: of the steps of such rows.

    Args:
        spec: of the engine.
        pool: where the KV lies; what the batch adds to it is its own.
    """

    def __init__(self, spec: EngineSpec, pool: KvPool) -> None:
        self._spec, self._pool = spec, pool
        self.ready: list[Job] = []
        self.running: dict[Job, None] = {}
        self.run: DecodeRun | None = None
        self.meter = StepMeter()
        self._fresh: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._steps = self._planned = 0
        self._context = 0.0

    def __len__(self) -> int:
        return len(self.running)

    @property
    def context_tokens(self) -> float:
        """KV that a step reads."""
        return self._context

    @property
    def growth(self) -> float:
        """KV tokens that a step adds."""
        return len(self.running) * self._spec.accept_length

    def join(self) -> list[Job]:
        """Take those that are ready into the batch; returns those whose whole answer came with their KV."""
        whole = []
        for job in self.ready:
            job.generated = max(job.generated, job.brought)
            if not job.left:
                job.phase = Phase.GONE
                self._pool.drop(job)
                whole.append(job)
                continue
            job.phase = Phase.RUNNING
            job.joined_step = self._steps
            job.end_step = self._steps + max(1, math.ceil(job.left / self._spec.accept_length - 1e-9))
            self.running[job] = None
            self._context += job.kv_tokens
            heapq.heappush(self._ends, (job.end_step, next(self._order), job))
            self._fresh.append(job)
        self.ready = []
        return whole

    # --- a row of steps with the batch as it is

    def begin(self, at: float) -> DecodeRun:
        """Decode from `at` on, until the batch changes by itself; there must be a job."""
        run = DecodeRun.of(
            self._spec.timing.decode, at=at, batch=len(self.running), kv_tokens=self._context,
            accept_length=self._spec.accept_length,
        )  # fmt: skip
        while self._ends[0][2] not in self.running:
            heapq.heappop(self._ends)
        until_end = self._ends[0][0] - self._steps
        until_full = math.floor((self._pool.room + _ROUNDING) / run.growth)
        self.run, self._planned = run, max(1, min(until_end, until_full))
        return run

    @property
    def ends_at(self) -> float | None:
        """When the row ends; None: there is none."""
        return None if self.run is None else self.run.ends(self._planned)

    def cut(self, at: float) -> None:
        """Let the row end with the step that goes on."""
        if self.run is not None:
            self._planned = min(self._planned, self.run.boundary(at))

    def complete(self, at: float) -> list[Happening]:
        """The row is over, at its end; returns who has finished."""
        run, self.run = self.run, None
        if run is None:
            return []
        self._count(run, self._planned)
        return self.settle(self._planned, at)

    def grown(self, at: float) -> float:
        """KV tokens that steps of the row have added without having been settled."""
        return 0.0 if self.run is None else self.run.growth * self.run.steps_before(at)

    def step_seconds(self, at: float) -> float | None:
        """What the step that goes on takes, or what the last ones took."""
        if self.run is None:
            return self.meter.step_seconds
        return self.run.first_seconds + self.run.more_seconds * self.run.steps_before(at)

    def _count(self, run: DecodeRun, steps: int) -> None:
        self.meter.add(round(run.growth * steps), run.ends(steps) - run.at, steps=steps)

    # --- what a step changes

    def firsts(self, begin: float, end: float) -> Iterable[Happening]:
        """When those that have just joined show their first tokens, in a step from `begin` to `end`."""
        return [Happening(Kind.FIRST, job, begin if job.generated else end) for job in self._fresh]

    def settle(self, steps: int, at: float) -> list[Happening]:
        """So many steps are over; returns who has finished, at that moment."""
        if not steps:
            return []
        self._fresh = []
        grown = self.growth * steps
        self._steps += steps
        self._context += grown
        self._pool.take(grown)
        finished = []
        while self._ends and self._ends[0][0] <= self._steps:
            job = heapq.heappop(self._ends)[2]
            if job in self.running:
                self._leave(job)
                job.generated = job.output_tokens
                job.phase = Phase.GONE
                self._pool.drop(job)
                finished.append(Happening(Kind.FINISHED, job, at))
        return finished

    def remove(self, job: Job) -> None:
        """A job leaves with what it holds; there must be no run that counts on it."""
        if job in self.running:
            self._leave(job)
        else:
            self.ready.remove(job)
        self._fresh = [each for each in self._fresh if each is not job]
        self._pool.drop(job)

    def retract(self) -> list[Job]:
        """Make room for some steps: those that have generated least lose their places; one always stays."""
        lost: list[Job] = []
        if self._pool.room >= self.growth - _ROUNDING:
            return lost
        by_progress = sorted(self.running, key=lambda job: (-self._done(job), job.prompt_tokens))
        while len(self.running) > 1 and self._pool.room < self.growth * _RETRACT_STEPS:
            job = by_progress.pop()
            done = self._done(job)
            self.remove(job)
            # What it has generated is a part of the prompt that it comes back with.
            job.generated = job.brought = 0
            job.prompt_tokens += done
            job.output_tokens = max(1, job.output_tokens - done)
            lost.append(job)
        return lost

    def done(self, job: Job, at: float) -> int:
        """Output tokens of a job in the batch by a moment."""
        further = 0 if self.run is None else self.run.steps_before(at)
        return min(job.output_tokens, self._done(job) + math.floor(further * self._spec.accept_length))

    def _done(self, job: Job) -> int:
        steps = self._steps - job.joined_step
        return min(job.output_tokens, job.generated + math.floor(steps * self._spec.accept_length))

    def _leave(self, job: Job) -> None:
        grown = (self._steps - job.joined_step) * self._spec.accept_length
        del self.running[job]
        self._context -= job.kv_tokens + grown
        self._pool.give_back(grown)
        if not self.running:
            self._context = 0.0
