"""What SGLang's scheduler spends on the prefix cache per chunk of a long prompt, and where.

    python bench/engine/prefix_tree.py                  # 64k to 1M tokens, JSON into results/
    python bench/engine/prefix_tree.py --quick

One request is computed chunk by chunk with SGLang's own code between two steps: `cache_unfinished_req` (copy of the
ids, key, copy of the KV indices, insert, match, write-back, locks), `init_next_round_input`, and the copy of the ids in
`prepare_for_extend`. Each part is timed by a wrapper around SGLang's function, in CPU time of the thread, since others
may use the machine; what no part explains is "other". KV indices lie in host memory: on a GPU their copies are kernels
that the scheduler does not wait for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kllm_engine.sglang import prefix_tree

HERE = Path(__file__).parent
CORES = ("rust", "python", "kllm")
"""SGLang's default, its other one, and that of kLLM's plugin."""
PARTS = ("copy ids", "key", "insert", "match", "write back", "locks")


class Parts:
    """Seconds by part; a part within another one counts for the outer one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] += time.thread_time() - began
            self._inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*arguments, **named)

        return call


class Allocator:
    """Stands for SGLang's allocator of KV, of which nothing is freed here."""

    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def available_size(self) -> int:
        return 1 << 40

    def get_kvcache(self) -> Any:
        return SimpleNamespace()


def cache(core: str, page_size: int, tokens: int) -> Any:
    """SGLang's prefix cache with one row of the request pool."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: PLC0415
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: PLC0415
    from sglang.srt.mem_cache.unified_radix_cache import ComponentType, UnifiedRadixCache  # noqa: PLC0415

    pool = ReqToTokenPool(1, tokens, "cpu", enable_memory_saver=False)
    if core == "kllm":
        prefix_tree.register()
    params = CacheInitParams(
        disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=Allocator(page_size), page_size=page_size,
        tree_components=(ComponentType.FULL,), tree_core_backend=core,
    )  # fmt: skip
    return UnifiedRadixCache(params)


def request(ids: array[int]) -> Any:
    """A request of SGLang's own."""
    from sglang.srt.managers.schedule_batch import Req  # noqa: PLC0415
    from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

    made = Req("a", "", ids, SamplingParams(max_new_tokens=1), vocab_size=200_000)
    made.kv.req_pool_idx = 1
    return made


def measure(core: str, *, tokens: int, chunk: int, page_size: int) -> dict[str, Any]:
    """Compute one prompt, and tell what each chunk took."""
    from sglang.srt.mem_cache import unified_radix_cache as module  # noqa: PLC0415

    tree = cache(core, page_size, tokens)
    ids = array("q", random.Random(tokens).choices(range(150_000), k=tokens))
    tree.req_to_token_pool.req_to_token[1] = torch.arange(tokens, dtype=torch.int32)
    one = request(ids)
    one.init_next_round_input(tree)
    one.lock_receipt = tree.inc_lock_ref(one.last_node).to_dec_params()
    parts = Parts()
    key = module.RadixKey
    module.RadixKey = parts.timed("key", key)
    tree.insert = parts.timed("insert", tree.insert)
    tree.match_prefix = parts.timed("match", tree.match_prefix)
    tree.inc_lock_ref = parts.timed("locks", tree.inc_lock_ref)
    tree.dec_lock_ref = parts.timed("locks", tree.dec_lock_ref)
    tree.req_to_token_pool.write = parts.timed("write back", tree.req_to_token_pool.write)
    ids_so_far, store = one.get_fill_ids, tree.cache_unfinished_req
    if core == "kllm":
        ids_so_far = partial(prefix_tree.fill_ids, lambda _: one.full_untruncated_fill_ids[: one.extend_range.end], one)
        store = partial(prefix_tree.cache_unfinished, type(tree).cache_unfinished_req, tree)
    one.get_fill_ids = parts.timed("copy ids", ids_so_far)
    per_chunk: list[float] = []
    by_part: list[dict[str, float]] = []
    try:
        for end in range(chunk, tokens + 1, chunk):
            parts.seconds.clear()
            began = time.thread_time()
            one.init_next_round_input()
            one.set_extend_range(end - chunk, end)
            one.get_fill_ids()[len(one.prefix_indices) :]
            store(one, chunked=True)
            per_chunk.append(time.thread_time() - began)
            by_part.append(dict(parts.seconds))
    finally:
        module.RadixKey = key
    assert len(one.prefix_indices) == tokens
    return {
        "core": core, "tokens": tokens, "page_size": page_size, "chunk": chunk,
        "total_ms": round(sum(per_chunk) * 1000, 2), "first_ms": round(per_chunk[0] * 1000, 3),
        "median_ms": round(statistics.median(per_chunk) * 1000, 3),
        "last_ms": round(statistics.median(per_chunk[-4:]) * 1000, 3),
        "total_ms_by_part": shares(per_chunk, by_part),
        "last_ms_by_part": shares(per_chunk[-1:], by_part[-1:]),
    }  # fmt: skip


def shares(per_chunk: list[float], by_part: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds of each part, and what is left."""
    told = {name: sum(parts.get(name, 0.0) for parts in by_part) * 1000 for name in PARTS}
    told["other"] = sum(per_chunk) * 1000 - sum(told.values())
    return {name: round(value, 3) for name, value in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", nargs="+", choices=CORES, default=list(CORES))
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3, help="the run with the smallest total is told")
    parser.add_argument("--quick", action="store_true", help="64k tokens only")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "prefix_tree.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "sglang": importlib.metadata.version("sglang"),
        "torch": torch.__version__,
        "rows": [],
    }
    for core in given.cores:
        for page_size in given.page_sizes:
            for tokens in [65_536] if given.quick else [65_536, 131_072, 262_144, 524_288, 1_048_576]:
                runs = [
                    measure(core, tokens=tokens, chunk=given.chunk, page_size=page_size) for _ in range(given.repeat)
                ]
                row = min(runs, key=lambda run: run["total_ms"])
                document["rows"].append(row)
                print(json.dumps(row), flush=True)
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
