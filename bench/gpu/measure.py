"""One prefill and one decode instance on one GPU: start, equality with a plain server, latencies.

    python bench/gpu/measure.py small --out results/small.json       # SmolLM2-135M
    python bench/gpu/measure.py large --out results/large.json       # an 8B Llama with random weights

Without a GPU it measures the same things on the CPU, so that it can be rehearsed: add `--quick`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import serving
from asking import Endpoint, first_answer, load, prompt, texts
from models import CHANGES_FOR_A_REHEARSAL, dummy_llama

from kllm_engine.sglang.arguments import detect_device

HERE = Path(__file__).parent
ON_GPU = detect_device() == "cuda"

# What a GPU machine without FlashAttention-3 and with two engines on one GPU needs. The pools are bounded by tokens:
# shares of the GPU's memory would be taken while the other engine loads, and depend on who is first.
SHARED_GPU: dict[str, Any] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "dtype": "bfloat16",
    "mem-fraction-static": 0.9,
    "max-running-requests": 64,
    "cuda-graph-max-bs-decode": 64,
    "chunked-prefill-size": 8192,
}


class Results:
    """Written after every step: a run that is cut off keeps what it has."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        self._content: dict[str, Any] = dict(facts)
        self._began = time.monotonic()

    def add(self, name: str, value: Any) -> None:
        self._content[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._content, indent=1) + "\n")
        shown = json.dumps(
            {key: part for key, part in value.items() if not key.endswith("rows")} if isinstance(value, dict) else value
        )
        print(f"[{time.monotonic() - self._began:6.1f} s] {name}: {shown[:1500]}", flush=True)


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30), "python": platform.python_version(),
    }  # fmt: skip
    if ON_GPU:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def gpu_mebibytes() -> int | None:
    if not ON_GPU:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def started(service: serving.Service) -> dict[str, Any]:
    """How a service came up, and what it holds."""
    zygote = psutil.Process(service.pids()["zygote"])
    return {
        "ready_seconds": round(service.ready_seconds, 2),
        "steps": service.steps,
        "instances": service.instances(),
        "zygote_threads": zygote.num_threads(),
        "zygote_rss_mib": zygote.memory_info().rss >> 20,
        "zygote_pss_mib": zygote.memory_full_info().pss >> 20,
        "gpu_mib": gpu_mebibytes(),
    }


async def equality(service: serving.Service, plain: Endpoint, sizes: argparse.Namespace) -> dict[str, Any]:
    """Greedy texts of late and early binding, each beside the plain server's.

    Each binding has prompts of its own: one that is asked twice is computed from the prefix cache, in other kernels,
    and then the plain server already differs from itself.
    """
    outcome: dict[str, Any] = {"output_tokens": sizes.output_tokens}
    with serving.early_router(service) as early:
        for binding, endpoint in (("late", service.endpoint), ("early", early)):
            seeds = [f"equal/{binding}/{size}" for size in sizes.equality]
            prompts = [
                prompt(size, seed=seed, vocabulary=sizes.vocabulary)
                for size, seed in zip(sizes.equality, seeds, strict=True)
            ]
            expected = await texts(plain, prompts, sizes.output_tokens)
            got = await texts(endpoint, prompts, sizes.output_tokens)
            rows = [
                {
                    "prompt_tokens": one.prompt_tokens,
                    "equal": one.text == two.text,
                    "tokens": [one.tokens, two.tokens],
                    "characters_until_they_differ": common(one.text, two.text),
                    "characters": len(one.text),
                }
                for one, two in zip(expected, got, strict=True)
            ]
            outcome[binding] = f"{sum(row['equal'] for row in rows)} of {len(rows)} equal"
            outcome[f"{binding}_rows"] = rows
    return outcome


def common(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


async def latencies(endpoint: Endpoint, results: Results, name: str, sizes: argparse.Namespace) -> None:
    seed = 0
    for isl in sizes.prompt_tokens:
        for at_once, count in ((1, sizes.requests), (16, sizes.requests * 4)):
            seed += 1
            prompts = [prompt(isl, seed=f"{name}/{seed}/{i}", vocabulary=sizes.vocabulary) for i in range(count)]
            # Kernels of a new shape are compiled when it comes first, for up to two seconds.
            warm = [
                prompt(isl, seed=f"warm/{name}/{seed}/{i}", vocabulary=sizes.vocabulary) for i in range(2 * at_once)
            ]
            await load(endpoint, warm, 8, at_once=at_once)
            outcome = await load(endpoint, prompts, sizes.output_tokens, at_once=at_once)
            results.add(f"{name}_{isl}x{sizes.output_tokens}_at_{at_once}", outcome)


async def measure(document: dict[str, Any], results: Results, sizes: argparse.Namespace) -> None:
    plain_args = document["spec"]["prefill"]["engineArgs"]
    short = prompt(24, seed="first", vocabulary=sizes.vocabulary)
    for number in range(sizes.starts):
        with serving.up(document) as service:
            results.add(f"start_{number}", started(service))
            results.add(f"start_{number}_first_answer_seconds", round(await first_answer(service.endpoint, short), 3))
            if number < sizes.starts - 1:
                continue
            await latencies(service.endpoint, results, "pair", sizes)
            results.add("pair_loads", service.loads())
            async with serving.plain_server(service, plain_args) as (plain, ready):
                results.add("plain_ready_seconds", round(ready, 3))
                results.add("plain_first_answer_seconds", round(await first_answer(plain, short), 3))
                results.add("gpu_mib_with_plain", gpu_mebibytes())
                results.add("equality", await equality(service, plain, sizes))
                await latencies(plain, results, "plain", sizes)
            keep(service.run / "logs", results)


def keep(logs: Path, results: Results) -> None:
    """Copy the logs beside the results: they tell where a start's time went."""
    target = results._path.parent / f"{results._path.stem}-logs.tar.gz"
    shutil.make_archive(str(target).removesuffix(".tar.gz"), "gztar", logs)


def options(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """What all scripts that write results of a service take; `quick` says what that makes of it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="conditions worth knowing")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def main() -> None:
    parser = options(__doc__, quick="few and short requests, tiny model")
    parser.add_argument("model", choices=["small", "large"])
    parser.add_argument("--starts", type=int, default=2, help="how often to start the service; the last is measured")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON object of changes to SGLang's")
    given = parser.parse_args()
    engine_args = dict(SHARED_GPU) if ON_GPU else {"context-length": 4096}
    sizes = argparse.Namespace(
        starts=given.starts, prompt_tokens=[512, 4096], output_tokens=64, requests=20, vocabulary=49000,
        equality=[5, 17, 64, 100, 300, 512, 700, 1000, 1500, 2000, 3000, 4000],
    )  # fmt: skip
    if ON_GPU:
        engine_args["max-total-tokens"] = 300_000 if given.model == "small" else 150_000
    uri = "demo://tiny-random-llama" if given.quick else "demo://smollm2-135m"
    if given.quick:
        sizes.prompt_tokens, sizes.requests, sizes.output_tokens, sizes.equality = [128], 4, 16, [5, 17, 300, 700]
        sizes.vocabulary = 500
    with tempfile.TemporaryDirectory(prefix="kllm-gpu-model-") as folder:
        if given.model == "large":
            cache = Path(folder) / "cache"
            command = ["kllm_engine.main", "model", uri, "--cache", str(cache)]
            subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
            tokenizer = next(cache.glob("models/*/tokenizer.json")).parent
            uri = str(dummy_llama(Path(folder) / "llama", tokenizer, CHANGES_FOR_A_REHEARSAL if given.quick else {}))
            engine_args["load-format"] = "dummy"
        engine_args |= given.engine_args
        results = Results(
            given.out, machine=machine(), note=given.note, model=given.model, engine_args=engine_args, uri=uri
        )
        asyncio.run(measure(serving.manifest(uri, engine_args), results, sizes))


if __name__ == "__main__":
    main()
