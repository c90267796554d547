"""A service in virtual time: instances in memory, and the loads that a rate of requests gives them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

from plan.plan_helpers import IDLE, OBJECTIVES, TIMING, D, P, limits, traffic
from substrate.memory_substrate import MemorySubstrate

from kllm_core.fleet import InstanceState
from kllm_operator.fleet.told import Told
from kllm_operator.loop.control import Control, Scaled
from kllm_operator.loop.settings import LoopSettings
from kllm_operator.plan.demand import Forecast, Stages

PREFILL_TOKENS_PER_SECOND = 9000.0
PROMPT_TOKENS = 1000


class World:
    """A substrate, what is heard of it, and a control loop. To be made inside a running loop.

    Attributes:
        rate: requests per second; None: the routers are silent.
        output: tokens per answer.
        silent: instances whose agents say nothing more.
        unflippable: instances whose agents say that they cannot switch roles.
        mortal: whether an instance dies a second after it began to serve, by id.
        events: what the loop told, with the time.
        broken: promises that did not hold at some moment.
        counts: where desired counts are kept; None: in the loop's memory.
        control: the loop that runs.
    """

    def __init__(self, *, bounds=None, settings=None, advise_only=False, start_seconds=8.0, counts=None, **substrate):
        self.loop = asyncio.get_running_loop()
        self.bounds = bounds or limits()
        self.substrate = MemorySubstrate(start=start_seconds, drain=2.0, switch=1.0, **substrate)
        self.rate, self.output = 0.0, 20.0
        self.silent, self.unflippable = set(), set()
        self.mortal = lambda name: False
        self.queued = 0.0
        self.events, self.broken, self.reports = [], [], []
        self.told = {}
        self.followed = {}
        self._listeners = []
        self.counts, self.control = counts, None
        self.settings = settings or LoopSettings()
        self.scaled = Scaled(OBJECTIVES, self.bounds, advise_only, TIMING, start_seconds)
        self.substrate.subscribe(self._check)

    # --- what the loop hears

    def subscribe(self, listener):
        self._listeners.append(listener)

    def follow(self, addresses):
        self.followed = dict(addresses)
        self.told = {name: told for name, told in self.told.items() if name in addresses}

    def forecast(self, now):
        return Forecast() if self.rate is None else traffic(self.rate, float(PROMPT_TOKENS), self.output)

    def stages(self, now, *, percentile, changed_age_seconds):
        return Stages()

    # --- what tests do

    def made(self):
        """A new loop, as after a restart."""
        self.control = Control(
            self.scaled, self.substrate, self, settings=self.settings, publish=self.reports.append, counts=self.counts,
            tell=lambda event: self.events.append((self.loop.time(), event)),
        )  # fmt: skip
        return self.control

    @contextlib.asynccontextmanager
    async def running(self):
        """One instance of each role (or the minimum), seconds of reports, and the loop."""
        for role in (P, D):
            for _ in range(self.bounds.of(role).min_replicas):
                await self.substrate.start(role)
        await asyncio.sleep(self.substrate.seconds["start"] + 0.1)
        engines = asyncio.create_task(self._engines())
        loop = asyncio.create_task(self.made().run())
        try:
            await asyncio.sleep(2)
            yield self
        finally:
            loop.cancel()
            engines.cancel()
            results = await asyncio.gather(loop, engines, return_exceptions=True)
            await self.substrate.close()
            for result in results:
                if not isinstance(result, asyncio.CancelledError):
                    raise result
        assert self.broken == []

    def serving(self):
        seen = [each for each in self.substrate._all.values() if each.state is InstanceState.SERVING]
        return sum(each.role is P for each in seen), sum(each.role is D for each in seen)

    def of(self, name, **wanted):
        """Events of a kind, as documents with their times."""
        documents = [{"at": at, **event.document()} for at, event in self.events if event.name == name]
        return [each for each in documents if wanted.items() <= each.items()]

    # --- the world

    async def _engines(self):
        born = {}
        while True:
            serving = [each for each in await self.substrate.observe() if each.state is InstanceState.SERVING]
            for each in serving:
                if self.loop.time() - born.setdefault(each.id, self.loop.time()) >= 1 and self.mortal(each.id):
                    self.substrate.die(each.id)
            prefills, decodes = (max(1, sum(each.role is role for each in serving)) for role in (P, D))
            arriving = (self.rate or 0.0) * PROMPT_TOKENS
            self.queued = max(0.0, self.queued + arriving - prefills * PREFILL_TOKENS_PER_SECOND)
            loads = {
                P: replace(IDLE, queued_uncached_tokens=int(self.queued / prefills)),
                D: replace(IDLE, running_requests=int((self.rate or 0.0) * self.output * 0.03 / decodes)),
            }
            for each in await self.substrate.observe():
                if each.id in self.followed and each.id not in self.silent:
                    self.told[each.id] = Told(
                        self.loop.time(),
                        incarnation=1,
                        load=loads[each.role],
                        flippable=each.id not in self.unflippable,
                    )
            for listener in self._listeners:
                listener()
            await asyncio.sleep(1.0)

    def _check(self):
        there = list(self.substrate._all.values())
        made = Counter(each.role for each in there)
        held = sum(self.bounds.of(role).gpus * count for role, count in made.items())
        if not self.bounds.fits(held):
            self.broken.append(f"{held} accelerators at {self.loop.time()}")
        for role in (P, D):
            states = {InstanceState.SERVING, InstanceState.STARTING}
            instances = [each for each in there if each.role is role and not each.slot]
            coming = [each for each in instances if not each.ending and each.state in states]
            replaced = any(each.revision != self.substrate.revisions[role] for each in coming)
            if len(coming) > self.bounds.of(role).max_replicas + (self.bounds.surge if replaced else 0):
                self.broken.append(f"{len(coming)} {role} at {self.loop.time()}")
