"""Two routers find as much in caches, and spread work as evenly, as one would, whichever of them a turn meets."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time

from kllm_core.blocks import block_hashes
from kllm_core.contracts.engine.v1 import engine_pb2
from kllm_core.objectives import Role
from kllm_router.discovery.instances import DiscoveredInstance
from kllm_router.interfaces import EngineRequest
from kllm_router.proxy.fleet_view import AgentFleetView
from kllm_router.scheduling.quota import NOTHING
from kllm_router.shared.peers import Peers
from kllm_router.shared.told import Told, decode, encode

PAGE = 16
INSTANCES = 4
RATE = 2200.0
"""Tokens that an instance computes in a second."""
TELLS_SECONDS = 0.1
ROUND_SECONDS = 0.15
CONVERSATIONS = 80
TURNS = 5
TURN_TOKENS = 320
SHARED_TOKENS = 960
"""Of the few system prompts with which conversations begin."""


class Others:
    """What a router hears of the others."""

    def __init__(self):
        self.view = None
        self.peers = Peers(1.0, self.hear)

    def hear(self, instance_id, marks, now):
        self.view.expected.note(instance_id, marks, now)

    def of(self, instance_id, now):
        return self.peers.of(instance_id, now)

    def spent(self, key, now):
        return NOTHING

    def status(self):
        return None


class Idle:
    """Follows nobody: the test tells the books itself."""

    async def run(self):
        await asyncio.Event().wait()


class Simulation:
    """Prefill instances in virtual time, and routers that choose among them."""

    def __init__(self, routers, *, shares=True, tells=True, seed=1):
        self.shares = shares
        self.tells = tells
        self.now = time.monotonic()
        self.rng = random.Random(seed)
        self.others = [Others() for _ in range(routers)]
        self.views = []
        for each in self.others:
            each.view = AgentFleetView(
                token="t" * 20, rng=random.Random(0), clock=lambda: self.now, follow=lambda *_: Idle(), shared=each
            )
            self.views.append(each.view)
        self.free_at = dict.fromkeys((f"p{i}" for i in range(INSTANCES)), self.now)
        self.cache = {name: set() for name in self.free_at}
        self.sent = {name: {} for name in self.free_at}
        self.hits = self.tokens = 0
        self.waits = []
        self._steps = []
        self._numbers = itertools.count()
        found = [DiscoveredInstance(name, Role.PREFILL, f"a:{i}") for i, name in enumerate(self.free_at)]
        found.append(DiscoveredInstance("d0", Role.DECODE, "a:9"))
        for view in self.views:
            view.book.apply(found)
            for each in found:
                view.book.on_facts(each.id, facts(each))

    def at(self, seconds, step):
        heapq.heappush(self._steps, (self.now + seconds, next(self._numbers), step))

    def run(self):
        end = self.now + 60
        self.at(0, self.report)
        if self.shares:
            self.at(0.05, self.exchange)
        while self._steps and self._steps[0][0] < end:
            self.now, _, step = heapq.heappop(self._steps)
            step()

    def report(self):
        for view in self.views:
            for name, free_at in self.free_at.items():
                queued = max(0, round((free_at - self.now) * RATE))
                view.book.on_load(name, load(queued))
            view.book.on_load("d0", load(0))
        self.at(TELLS_SECONDS, self.report)

    def exchange(self):
        for i, view in enumerate(self.views):
            told = Told(next(self._numbers), view.shares(), {}, view.homes.told(self.now))
            for j, other in enumerate(self.others):
                if i != j:
                    other.peers.hear(str(i), decode(encode(told)), self.now)
                    other.peers.settle(self.now)
        self.at(ROUND_SECONDS, self.exchange)

    def ask(self, prompt):
        view = self.rng.choice(self.views)
        request = EngineRequest(f"{next(self._numbers):032x}", "/v1/completions", {}, prompt)
        endpoint = view.choose_prefill(request)
        name = endpoint.instance_id
        view.started(request.rid, endpoint, len(prompt))
        start = max(self.now, self.free_at[name])
        blocks = block_hashes(prompt, PAGE)
        # What is computed before this one will be there when it begins.
        cached = sum(1 for _ in itertools.takewhile(self.cache[name].__contains__, blocks)) * PAGE
        self.cache[name].update(blocks)
        left = len(prompt) - cached
        self.hits += cached
        self.tokens += len(prompt)
        self.free_at[name] = start + left / RATE
        self.waits.append(self.free_at[name] - self.now)
        self.at(self.free_at[name] - self.now, lambda: self.done(view, request, endpoint, blocks))

    def done(self, view, request, endpoint, blocks):
        event = engine_pb2.RequestEvent(
            request_id=request.rid, incarnation=1, kind=engine_pb2.REQUEST_EVENT_KIND_PREFILL_DONE,
            prompt_tokens=len(request.input_ids),
        )  # fmt: skip
        view.book.on_request(endpoint.instance_id, event)
        view.finished(request.rid, endpoint)
        if self.tells:
            self.at(TELLS_SECONDS * self.rng.random(), lambda: self.tell(endpoint.instance_id, blocks))

    def tell(self, name, blocks):
        update = engine_pb2.CacheUpdate(incarnation=1, stored=engine_pb2.BlocksStored(blocks=blocks))
        for view in self.views:
            view.book.on_cache(name, update)

    @property
    def hit_share(self):
        return self.hits / self.tokens

    @property
    def mean_wait(self):
        """Seconds until a prompt is computed, its queue included: work that is spread badly waits."""
        return sum(self.waits) / len(self.waits)


def facts(instance):
    role = engine_pb2.ROLE_PREFILL if instance.role is Role.PREFILL else engine_pb2.ROLE_DECODE
    return engine_pb2.Instance(
        instance_id=instance.id, role=role, state=engine_pb2.INSTANCE_STATE_SERVING, incarnation=1, page_size=PAGE,
        http_address="127.0.0.1:1", bootstrap_host="127.0.0.1", bootstrap_port=2, context_tokens=100_000,
        kv_total_tokens=10_000_000,
    )  # fmt: skip


def load(queued):
    return engine_pb2.LoadReport(
        incarnation=1, state=engine_pb2.INSTANCE_STATE_SERVING, running_requests=0, queued_uncached_tokens=queued,
        prefill_tokens_per_second=RATE, kv_used_tokens=0,
    )  # fmt: skip


def converse(simulation, *, seed=7):
    """Conversations whose turns come seconds apart, and in bursts within a conversation's first second."""
    rng = random.Random(seed)
    systems = [[rng.randrange(50_000) for _ in range(SHARED_TOKENS)] for _ in range(3)]

    def turn(prompt, left):
        simulation.ask(prompt)
        if left:
            longer = prompt + [rng.randrange(50_000) for _ in range(TURN_TOKENS)]
            simulation.at(rng.choice([0.05, 0.3, 3.0, 6.0]), lambda: turn(longer, left - 1))

    for _ in range(CONVERSATIONS):
        first = rng.choice(systems) + [rng.randrange(50_000) for _ in range(TURN_TOKENS)]
        simulation.at(rng.random() * 20, lambda first=first: turn(first, TURNS - 1))


async def outcome(routers, **values):
    simulation = Simulation(routers, **values)
    converse(simulation)
    simulation.run()
    for view in simulation.views:
        await view.book.close()
    return simulation.hit_share, simulation.mean_wait


async def test_two_routers_reach_nearly_all_of_what_one_finds_in_caches_and_are_as_even():
    hit, wait = await outcome(1)
    hits, waits = await outcome(2)

    assert hit > 0.5
    assert hits >= 0.95 * hit
    assert waits <= wait / 0.9  # runs with other seeds differ by some percent


async def test_with_engines_that_never_tell_of_their_cache_routers_know_it_of_each_other():
    hit, wait = await outcome(1, tells=False)
    hits, waits = await outcome(2, tells=False)
    alone, _ = await outcome(2, tells=False, shares=False)

    assert hits >= 0.95 * hit
    assert waits <= wait / 0.9
    assert alone < 0.95 * hit
