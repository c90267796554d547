"""Memory and speed of the prefix index: 2 million blocks over 1,000 instances, prompts of 128k tokens.

python bench/router/prefix_index.py [--blocks N] [--instances N] [--lookups N]

Instances have caches like those of conversations: a system prompt that all share, documents that some share, and turns
of their own; a tenth of the blocks lies in host memory. Lookups are prompts of 8,000 blocks of 16 tokens, of which an
instance has all, a part that several others have too, or the system prompt only; the worst ones change holders often.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from kllm_core.blocks import block_hashes
from kllm_router.scheduling.expected import ExpectedPrefixes, marks
from kllm_router.scheduling.prefix import PrefixIndex, Tier

RESULTS = Path(__file__).parent / "results" / "prefix_index.json"
PROMPT_BLOCKS = 8000
_SYSTEM_BLOCKS, _DOCUMENT_BLOCKS, _DOCUMENTS = 64, 500, 400


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def filled(blocks: int, instances: int, rng: np.random.Generator) -> tuple[PrefixIndex, dict[str, Any], list[Any]]:
    """An index, what filling it took, and the caches."""
    system = _hashes(_SYSTEM_BLOCKS, rng)
    documents = [_hashes(_DOCUMENT_BLOCKS, rng) for _ in range(_DOCUMENTS)]
    each = blocks // instances
    caches = []
    for _ in range(instances):
        shared = [documents[n] for n in rng.choice(_DOCUMENTS, max(0, (each // 2) // _DOCUMENT_BLOCKS), replace=False)]
        have = np.concatenate([system, *shared])[:each]
        caches.append((shared, np.concatenate([have, _hashes(each - len(have), rng)]).tolist()))
    gc.collect()
    before = resident_bytes()
    index = PrefixIndex()
    began = time.perf_counter()
    for number, (_, cache) in enumerate(caches):
        name, split = f"instance-{number}", len(cache) * 9 // 10
        index.begin(name, 1)
        index.store(name, 1, Tier.DEVICE, cache[:split])
        index.store(name, 1, Tier.HOST, cache[split:])
    seconds = time.perf_counter() - began
    gc.collect()
    figures = {
        "blocks": index.blocks,
        "index_mib": round((resident_bytes() - before) / 2**20, 1),
        "process_mib": round(resident_bytes() / 2**20, 1),
        "store_microseconds_per_block": round(seconds / index.blocks * 1e6, 2),
    }
    return index, figures, [system, *documents]


def lookups(index: PrefixIndex, shared: list[Any], instances: int, count: int, rng: np.random.Generator) -> Any:
    """Milliseconds of lookups by kind."""
    long = _hashes(PROMPT_BLOCKS, rng)
    index.begin("long", 1)
    index.store("long", 1, Tier.DEVICE, np.concatenate([shared[0], long]).tolist())
    ragged = _hashes(PROMPT_BLOCKS, rng)
    for number in range(min(64, instances)):
        index.store(f"instance-{number}", 1, Tier.DEVICE, ragged[: PROMPT_BLOCKS * (number + 1) // 64].tolist())
    chains = {
        "one has all of it": np.concatenate([shared[0], long])[:PROMPT_BLOCKS],
        "64 have parts of it": ragged,
        "all have the beginning": np.concatenate([shared[0], _hashes(PROMPT_BLOCKS, rng)])[:PROMPT_BLOCKS],
        "some have a document": np.concatenate([shared[0], shared[7], _hashes(PROMPT_BLOCKS, rng)])[:PROMPT_BLOCKS],
        "nobody has any": _hashes(PROMPT_BLOCKS, rng),
    }
    return {name: _timed(lambda chain=chain: index.match(chain), count) for name, chain in chains.items()}


def others(index: PrefixIndex, rng: np.random.Generator, count: int) -> Any:
    """What else a prompt of that length, or a change, takes."""
    ids = rng.integers(0, 150_000, PROMPT_BLOCKS * 16).tolist()
    chain = block_hashes(ids, 16)
    expected = ExpectedPrefixes()
    for number in range(2000):
        expected.note(f"instance-{number % 1000}", marks(_hashes(number + 1, rng)), 0.0)
    new = _hashes(16, rng).tolist()

    def change() -> None:
        index.store("instance-1", 1, Tier.DEVICE, new)
        index.remove("instance-1", 1, Tier.DEVICE, new)

    def restart() -> None:
        index.clear("instance-0", 1)

    return {
        "hashes of the chain": _timed(lambda: block_hashes(ids, 16), max(1, count // 10)),
        "expected prefixes of 2,000 prompts": _timed(lambda: expected.match(chain, 1.0), count),
        "16 blocks stored and removed": _timed(change, count),
        "one instance's cache cleared": _timed(restart, 1),
    }


def _timed(work: Any, count: int) -> dict[str, float]:
    """Wall-clock and CPU time; on a machine with other work only the latter tells of the code."""
    wall, cpu = [], []
    for _ in range(count):
        began, cpu_began = time.perf_counter(), time.thread_time()
        work()
        wall.append((time.perf_counter() - began) * 1e3)
        cpu.append((time.thread_time() - cpu_began) * 1e3)
    percentiles = {"p50": 50, "p99": 99}
    return {
        f"{name}_{kind}_ms": round(float(np.percentile(times, at)), 3)
        for kind, times in (("wall", wall), ("cpu", cpu))
        for name, at in percentiles.items()
    }


def _hashes(count: int, rng: np.random.Generator) -> Any:
    return rng.integers(1, 2**64, count, dtype=np.uint64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--lookups", type=int, default=2000, help="of each kind")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    index, figures, shared = filled(given.blocks, given.instances, rng)
    figures["lookup"] = lookups(index, shared, given.instances, given.lookups, rng)
    figures["other"] = others(index, rng, given.lookups)
    figures["machine"] = {"python": platform.python_version(), "processor": platform.processor() or platform.machine()}
    print(json.dumps(figures, indent=1))
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
