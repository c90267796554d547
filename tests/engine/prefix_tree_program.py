"""The incremental prefix tree beside SGLang's own: the same requests, chunk by chunk, with evictions, splits, aborts.

After every step both trees must have told the same events, match the same prefixes, lock and evict as many tokens, and
hold the same free KV, and every prompt must read KV that was computed for its own tokens.
"""

from __future__ import annotations

import sys
from array import array
from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import ComponentType, UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from kllm_engine.sglang import prefix_tree

PAGE = 2
POOL = 128
LONGEST = 40


class Allocator:
    """Pages of KV; each slot remembers the prefix that it was computed for."""

    device = "cpu"
    page_size = PAGE

    def __init__(self) -> None:
        self.free_pages = list(range(POOL // PAGE))
        self.holds: dict[int, tuple[int, ...]] = {}

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def get_kvcache(self) -> SimpleNamespace:
        return SimpleNamespace()

    def take(self, tokens: int) -> list[int]:
        pages = [self.free_pages.pop(0) for _ in range(-(-tokens // PAGE))]
        return [page * PAGE + offset for page in pages for offset in range(PAGE)]

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.free(indices)

    def free_full_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.free(indices)

    def free(self, indices: torch.Tensor) -> None:
        for page in sorted({int(index) // PAGE for index in indices}):
            assert page not in self.free_pages, "KV is freed once"
            self.free_pages.append(page)
        self.free_pages.sort()


class World:
    """One tree, and the requests that use it."""

    def __init__(self, core: str) -> None:
        self.allocator = Allocator()
        self.pool = ReqToTokenPool(8, LONGEST + PAGE, "cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.pool, token_to_kv_pool_allocator=self.allocator, page_size=PAGE,
            tree_components=(ComponentType.FULL,), tree_core_backend=core, enable_kv_cache_events=True,
        )  # fmt: skip
        self.tree = UnifiedRadixCache(params)
        self.store = self.tree.cache_unfinished_req
        if core == prefix_tree.BACKEND:
            self.store = partial(prefix_tree.cache_unfinished, UnifiedRadixCache.cache_unfinished_req, self.tree)
        self.requests: dict[int, Req] = {}

    def begin(self, number: int, ids: list[int]) -> None:
        one = Req(str(number), "", array("q", ids), SamplingParams(max_new_tokens=1), vocab_size=100)
        one.init_next_round_input(self.tree)
        one.lock_receipt = self.tree.inc_lock_ref(one.last_node).to_dec_params()
        one.kv.req_pool_idx = self.pool.free_slots.pop(0)
        one.kv.cache_protected_len = len(one.prefix_indices)
        self.pool.req_to_token[one.kv.req_pool_idx, : len(one.prefix_indices)] = one.prefix_indices.int()
        self.requests[number] = one

    def chunk(self, number: int, tokens: int) -> bool:
        """Compute the next tokens, if the pool has room for them."""
        one = self.requests[number]
        start, ids = len(one.prefix_indices), one.origin_input_ids
        end = min(start + tokens * PAGE, len(ids))
        held = -(-start // PAGE) * PAGE
        needed = max(0, end - held)
        if end <= start:
            return False
        if self.allocator.available_size() < -(-needed // PAGE) * PAGE:
            self.tree.evict(EvictParams(num_tokens=-(-needed // PAGE) * PAGE - self.allocator.available_size()))
        if self.allocator.available_size() < -(-needed // PAGE) * PAGE:
            return False
        row = self.pool.req_to_token[one.kv.req_pool_idx]
        slots = self.allocator.take(needed)
        row[held : held + len(slots)] = torch.tensor(slots, dtype=torch.int32)
        for position in range(start, end):
            self.allocator.holds[int(row[position])] = tuple(ids[: position + 1])
        one.init_next_round_input()
        one.set_extend_range(start, end)
        self.store(one, chunked=True)
        self.check(one)
        return True

    def check(self, one: Req) -> None:
        ids = one.origin_input_ids
        row = self.pool.req_to_token[one.kv.req_pool_idx]
        assert len(one.prefix_indices) == one.extend_range.end
        for position, index in enumerate(one.prefix_indices.tolist()):
            assert self.allocator.holds[index] == tuple(ids[: position + 1])
            assert int(row[position]) == index

    def end(self, number: int, *, insert: bool) -> None:
        """What `release_kv_cache` does for a request that holds KV of all that was computed."""
        one = self.requests.pop(number)
        computed = len(one.prefix_indices)
        row = self.pool.req_to_token[one.kv.req_pool_idx]
        if insert and computed:
            self.tree.insert_req(one, up_to=computed)
        kept = one.kv.cache_protected_len
        self.allocator.free(row[kept : -(-computed // PAGE) * PAGE])
        self.tree.unpin(one)
        self.tree.on_release(one, inserted=insert)
        self.pool.free_slots.append(one.kv.req_pool_idx)

    def take(self, number: int, step: tuple) -> bool:
        """Do one step, if it can be done."""
        running = sorted(self.requests)
        if step[0] == "evict":
            self.tree.evict(EvictParams(num_tokens=step[1]))
        elif step[0] == "begin":
            if len(running) == 6:
                return False
            self.begin(number, step[1])
        elif not running:
            return False
        elif step[0] == "chunk":
            return self.chunk(running[step[1] % len(running)], step[2])
        else:
            self.end(running[step[1] % len(running)], insert=step[0] == "finish")
        return True

    def told(self) -> list[str]:
        return [repr(event) for event in self.tree.tree_core.take_events()]

    def state(self, probes: list[list[int]]) -> dict[str, object]:
        matches = []
        for ids in probes:
            key = RadixKey(token_ids=array("q", ids))
            found = self.tree.match_prefix(MatchPrefixParams(key=key)).device_indices.tolist()
            for position, index in enumerate(found):
                assert self.allocator.holds[index] == tuple(ids[: position + 1])
            matches.append(len(found))
        return {
            "matches": matches, "evictable": self.tree.evictable_size(), "protected": self.tree.protected_size(),
            "free": self.allocator.available_size(), "events": self.told(),
            "positions": {n: (len(r.prefix_indices), r.kv.cache_protected_len) for n, r in self.requests.items()},
        }  # fmt: skip


prompts = st.builds(
    lambda stem, length, tail: (([stem] * 24)[:length] + tail)[:LONGEST],
    st.integers(1, 2), st.integers(4, 24), st.lists(st.integers(1, 3), min_size=10, max_size=20),
)  # fmt: skip
steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), prompts),
        *[st.tuples(st.just("chunk"), st.integers(0, 5), st.integers(1, 4)) for _ in range(6)],
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 40)),
    ),
    min_size=10,
    max_size=60,
)
examined = 0
appended = 0


@settings(max_examples=int(sys.argv[1]), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps)
def compare(plan: list[tuple]) -> None:
    global examined  # noqa: PLW0603
    examined += 1
    worlds = [World("python"), World(prefix_tree.BACKEND)]
    probes: list[list[int]] = []
    for number, step in enumerate(plan):
        if step[0] == "begin":
            probes.append(step[1])
        done = [world.take(number, step) for world in worlds]
        assert done[0] == done[1]
        states = [world.state(probes[-8:]) for world in worlds]
        assert states[0] == states[1], step
    for world in worlds:
        for number in sorted(world.requests):
            world.end(number, insert=False)
        world.tree.evict(EvictParams(num_tokens=POOL))
        assert world.allocator.available_size() == POOL, "all KV is free in the end"


def count_appends() -> None:
    real = prefix_tree._append

    def counted(*arguments: object) -> None:
        global appended  # noqa: PLW0603
        appended += 1
        real(*arguments)

    prefix_tree._append = counted


if __name__ == "__main__":
    prefix_tree.register()
    count_appends()
    compare()
    sys.stdout.write(f"examined {examined}\nappended {appended}\n")
