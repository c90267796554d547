"""Small engines, and a driver that advances one as a simulation does."""

from __future__ import annotations

import itertools

from kllm_core.engine_model.engine import Engine
from kllm_core.engine_model.job import Job, Kind
from kllm_core.engine_model.spec import Duty, EngineSpec
from kllm_core.timing import DecodeTiming, EngineTiming, PrefillTiming

TIMING = EngineTiming(PrefillTiming(a=0.01, b=1e-4, k=1e-9), DecodeTiming(a=0.01, b=2e-4, c=1e-7))


def spec(**changes) -> EngineSpec:
    return EngineSpec(TIMING, **({"kv_tokens": 100_000, "chunk_tokens": 1000, "block_tokens": 100} | changes))


def engine(duty=Duty.BOTH, **changes) -> Engine:
    return Engine(spec(**changes), duty)


def job(prompt=100, output=10, blocks=(), tag=None, brought=0) -> Job:
    return Job(tag, prompt, output, tuple(blocks), brought)


class Driver:
    """Gives jobs to an engine at their times and keeps what happened.

    On a prefill engine what is parked is taken at once, and on a decode engine KV comes `transfer` seconds after there
    is room for it.
    """

    def __init__(self, driven: Engine, *, transfer=0.0, take=True):
        self.engine, self.transfer, self.take = driven, transfer, take
        self.happened = []
        self.now = 0.0
        self._calls, self._order = [], itertools.count()

    def at(self, moment, call):
        self._calls.append((moment, next(self._order), call))

    def submit(self, moment, *jobs):
        for each in jobs:
            self.at(moment, lambda each=each: self.engine.submit(each))

    def run(self, until=1e6):
        while True:
            moments = [self._calls and min(self._calls)[0], self.engine.next_at]
            moments = [moment for moment in moments if moment not in (None, [])]
            if not moments or min(moments) > until:
                return self
            self.now = min(moments)
            while self._calls and min(self._calls)[0] <= self.now:
                first = min(self._calls)
                self._calls.remove(first)
                first[2]()
            self._advance()

    def _advance(self):
        for happening in self.engine.advance(self.now):
            self.happened.append(happening)
            if happening.kind is Kind.ADMITTED:
                self.at(self.now + self.transfer, lambda each=happening.job: self.engine.arrive(each))
            if happening.kind is Kind.PREFILLED and self.engine.duty is Duty.PREFILL and self.take:
                self.at(self.now, lambda each=happening.job: self.engine.withdraw(each))

    def times(self, kind):
        """By job, the last time of a kind."""
        return {each.job: each.at for each in self.happened if each.kind is kind}
