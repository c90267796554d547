"""One engine: prefill, decode, or both. Pure: callers bring the clock."""

from __future__ import annotations

from collections import deque

from kllm_core.engine_model.generating import DecodeBatch
from kllm_core.engine_model.holding import Holding
from kllm_core.engine_model.job import Happening, Job, Kind, Phase
from kllm_core.engine_model.meter import StepMeter
from kllm_core.engine_model.pool import KvPool
from kllm_core.engine_model.prefilling import PrefillQueue, PrefillStep, Turns
from kllm_core.engine_model.spec import Duty, EngineSpec
from kllm_core.fleet import EngineLoad

_ROUNDING = 1e-9
"""Seconds within which two moments are one."""


class Engine:
    """What one engine has, and when it changes by itself.

    After each call that gives it something or takes something from it, `advance` is to be called with the same moment;
    and whenever `next_at` has come. Like SGLang's scheduler it looks at what came only between two steps: a decode
    engine gives room and takes KV over then, and a prefill engine sends it. An engine for whole requests prefers
    prompts to decode steps, unless its steps are mixed; decode steps with one batch are not gone through one by one.

    Attributes:
        next_at: when something happens by itself; None: never, as it is.
        pool: its KV.

    Args:
        spec: of the engine.
        duty: what it does.
        turns: which prompts enter a step; as they came, each to its end, if left out.
    """

    def __init__(self, spec: EngineSpec, duty: Duty, *, turns: Turns | None = None) -> None:
        self.spec, self.duty = spec, duty
        self.next_at: float | None = None
        self.pool = KvPool(spec)
        self._prompts = PrefillQueue(spec, self.pool, turns)
        self._batch = DecodeBatch(spec, self.pool)
        self._room: deque[Job] = deque()
        self._may_admit = False
        self._retracted: set[Job] = set()
        self._held = Holding()
        self._leaving: list[Job] = []
        self._step: PrefillStep | None = None
        self._began = 0.0
        self._told: EngineLoad | None = None
        self._meter = StepMeter()

    # --- what it is given

    def fits(self, job: Job) -> bool:
        """Whether it can ever hold the job."""
        own = 0 if self.duty is Duty.PREFILL else job.output_tokens
        return job.prompt_tokens + own <= self.spec.kv_tokens

    def submit(self, job: Job) -> None:
        """A job comes: a prompt, or on a decode engine one that wants room for its KV.

        Raises:
            ValueError: it could never be held.
        """
        if not self.fits(job):
            raise ValueError(f"{job.prompt_tokens} + {job.output_tokens} tokens do not fit into {self.spec.kv_tokens}")
        job.phase = Phase.WAITING
        if self.duty is Duty.DECODE:
            self._room.append(job)
            self._may_admit = True
        else:
            self._prompts.add(job)

    def arrive(self, job: Job) -> None:
        """The KV of an admitted job is there."""
        self._held.drop(job)
        job.phase = Phase.READY
        self._batch.ready.append(job)

    def bind(self, job: Job) -> None:
        """A decode engine was asked to take a parked job."""
        if job.phase is Phase.PARKED:
            self._held.move(job, Phase.LEAVING)

    def park(self, job: Job) -> None:
        """It will not take it after all: the job waits again."""
        if job.phase is Phase.LEAVING:
            self._held.park(job)

    def withdraw(self, job: Job) -> None:
        """Take a job away, wherever it is, with what it holds: it was handed over, or nobody wants it any more.

        What is computed for it at the moment is computed to the end of the step.
        """
        phase, job.phase = job.phase, Phase.GONE
        if phase is Phase.WAITING:
            self._retracted.discard(job)
            (self._room if self.duty is Duty.DECODE else self._prompts).remove(job)
        elif phase is Phase.RUNNING:
            self._leaving.append(job)
        elif phase is Phase.READY:
            self._batch.remove(job)
        elif phase is not Phase.GONE:
            if phase is Phase.PREFILL:
                self._prompts.give_up(job)
            self._held.drop(job)
            self.pool.drop(job)
        self._may_admit = bool(self._room)

    # --- what happens

    def advance(self, now: float) -> list[Happening]:
        """Go on to this moment; returns what has happened since the last call, in its order."""
        happened: list[Happening] = []
        at, self._told = now, None
        while True:
            if self.next_at is not None and self.next_at <= now + _ROUNDING:
                at = self.next_at
                self._complete(happened, at)
            if self.next_at is None:
                self._admit(happened, at)
            if self._batch.run is not None and self._is_to_change():
                self._batch.cut(at)
                self.next_at = self._batch.ends_at
            if self.next_at is None:
                self._begin(happened, at)
            if self.next_at is None or self.next_at > now + _ROUNDING:
                return happened

    def _admit(self, happened: list[Happening], at: float) -> None:
        """Room on decode, in the order in which it was asked for."""
        self._may_admit = False
        while self._room:
            job, others = self._room[0], len(self._batch) + len(self._batch.ready) + len(self._held)
            need = job.prompt_tokens + self.spec.reserve_tokens * (others + 1)
            if others and (need > self.pool.room or others >= self.spec.max_running):
                break
            self._room.popleft()
            self._retracted.discard(job)
            self._held.move(job, Phase.ARRIVING)
            job.private_tokens = job.prompt_tokens
            self.pool.take(job.prompt_tokens)
            happened.append(Happening(Kind.ADMITTED, job, at))

    def _is_to_change(self) -> bool:
        return bool(self._batch.ready or self._leaving or self._may_admit) or self._prompts.has_work

    def _begin(self, happened: list[Happening], at: float) -> None:
        for job in self._leaving:
            self._batch.remove(job)
        self._leaving.clear()
        self._began = at
        if self.duty is not Duty.DECODE and self._prompts.has_work and self._begin_prompts(happened, at):
            return
        if self._join(happened, at):
            happened += self._batch.firsts(at, self._batch.begin(at).ends(1))
            self.next_at = self._batch.ends_at

    def _begin_prompts(self, happened: list[Happening], at: float) -> bool:
        """Begin a step with prompts, if there is one."""
        is_mixed = self.spec.mixed and self._join(happened, at)
        decoding = len(self._batch) if is_mixed else 0
        step = self._prompts.step(
            at,
            tokens=max(1, self.spec.chunk_tokens - decoding),
            places=self.spec.max_running - len(self._held) - len(self._batch) - len(self._batch.ready),
            blocked=self.duty is Duty.PREFILL and self._held.parked_tokens >= self.spec.parked_limit_tokens,
            reserve=self._reserve(),
        )
        if not step.chunks:
            return False
        self._held.prefilling.update(chunk.job for chunk in step.chunks)
        seconds = self.spec.timing.prefill.batch_seconds((each.new_tokens, each.before) for each in step.chunks)
        seconds += step.host_blocks * self.spec.block_tokens * self.spec.host_load_seconds
        if is_mixed:
            # The weights are read once, for both.
            decode = self.spec.timing.decode
            seconds = max(seconds, decode.a) + decode.b * decoding + decode.c * self._batch.context_tokens
            happened += self._batch.firsts(at, at + seconds)
        self._step, self.next_at = step, at + seconds
        return True

    def _join(self, happened: list[Happening], at: float) -> bool:
        """Let those that are ready join, and those for which there is no room leave; whether there is a batch."""
        for job in self._batch.join():
            happened += (Happening(Kind.FIRST, job, at), Happening(Kind.FINISHED, job, at))
        for job in self._batch.retract():
            self._retracted.add(job)
            job.phase = Phase.WAITING
            if self.duty is Duty.DECODE:
                self._room.appendleft(job)
            else:
                self._prompts.add(job, first=True)
            happened.append(Happening(Kind.RETRACTED, job, at))
        return len(self._batch) > 0

    def _reserve(self) -> int:
        """Room per further prompt for what those in decode will generate."""
        if self.duty is Duty.PREFILL:
            return 0
        others = len(self._batch) + len(self._batch.ready) + len(self._held.prefilling)
        return self.spec.reserve_tokens * (others + 1) if others else 0

    def _complete(self, happened: list[Happening], at: float) -> None:
        step, self.next_at, self._step = self._step, None, None
        if step is not None:
            self._meter.add(step.new_tokens, at - self._began)
            finished = self._batch.settle(1 if self.spec.mixed else 0, at)
        else:
            finished = self._batch.complete(at)
        gone = set(self._leaving)
        happened += [each for each in finished if each.job not in gone]
        self._leaving = [job for job in self._leaving if job in self._batch.running]
        for chunk in step.chunks if step is not None else ():
            self._computed(chunk.job, chunk.new_tokens, happened, at)

    def _computed(self, job: Job, tokens: int, happened: list[Happening], at: float) -> None:
        if job.phase is not Phase.PREFILL:
            return
        job.computed += tokens
        if job.computed < job.prompt_tokens:
            return
        self._held.drop(job)
        self._retracted.discard(job)
        self.pool.complete(job)
        job.prefilled_at = at
        happened.append(Happening(Kind.PREFILLED, job, at))
        if self.duty is Duty.PREFILL:
            self._held.park(job)
            return
        job.generated = 1
        if job.left:
            job.phase = Phase.READY
            self._batch.ready.append(job)
        else:
            job.phase = Phase.GONE
            self.pool.drop(job)
            happened.append(Happening(Kind.FINISHED, job, at))

    # --- what it tells

    @property
    def is_empty(self) -> bool:
        """Whether it has no request."""
        waiting = len(self._room) + len(self._prompts) + len(self._batch) + len(self._batch.ready)
        return not (waiting or self._held)

    def step_rest_seconds(self, now: float) -> float:
        """Until a prefill engine is between two steps, and sends KV."""
        return 0.0 if self.next_at is None else max(0.0, self.next_at - now)

    def done(self, job: Job, now: float) -> int:
        """Output tokens that a job has generated here by a moment."""
        if job.phase is not Phase.RUNNING:
            return job.generated
        return self._batch.done(job, now)

    def busy_seconds(self, now: float) -> float:
        """For which it has computed."""
        going_on = now - self._began if self.next_at is not None else 0.0
        return self._meter.busy_seconds + self._batch.meter.busy_seconds + going_on

    def load(self, now: float) -> EngineLoad:
        """What it says of itself at a moment that is not before the last call of `advance`."""
        if self._told is not None:
            return self._told
        load = self._load(now)
        # Between two calls of `advance`, only a row of decode steps changes anything.
        self._told = load if self._batch.run is None else None
        return load

    def _load(self, now: float) -> EngineLoad:
        run, grown, step_seconds = self._batch.run, self._batch.grown(now), self._batch.step_seconds(now)
        is_prefill, is_decode = self.duty is Duty.PREFILL, self.duty is Duty.DECODE
        return EngineLoad(
            age_seconds=0.0,
            running_requests=len(self._batch) + len(self._batch.ready) + len(self._held.prefilling),
            queued_requests=len(self._room) if is_decode else len(self._prompts),
            queued_tokens=sum(job.prompt_tokens for job in self._room) if is_decode else self._prompts.tokens,
            queued_uncached_tokens=None if is_decode else self._prompts.uncached_tokens,
            parked_requests=len(self._held.parked),
            parked_tokens=self._held.parked_tokens,
            parked_limit_tokens=self.spec.parked_limit_tokens if is_prefill else 0,
            kv_used_tokens=round(self.pool.used + grown),
            kv_evictable_tokens=max(0, round(self.pool.evictable - max(0.0, grown - self.pool.free))),
            kv_total_tokens=self.spec.kv_tokens,
            kv_high_water_tokens=None if is_prefill else self.spec.high_water_tokens,
            transferring_requests=len(self._held.moving),
            retracted_requests=len(self._retracted),
            prefill_step_seconds=self._meter.step_seconds,
            decode_step_seconds=step_seconds,
            prefill_tokens_per_second=self._meter.tokens_per_second,
            decode_tokens_per_second=None if run is None else run.growth / max(step_seconds or 0.0, _ROUNDING),
            max_running_requests=self.spec.max_running,
        )
