"""Simulated against real on a GPU: one prefill and one decode instance, and 80 seconds of a real trace.

    python bench/gpu/truth.py --out results/truth.json

An 8B Llama with random weights is served as it is, unpaced, and calibrated through the router (`kllm calibrate`); then
requests alone show what handing over takes, the trace is sent, and the simulator gets the calibrated timing. Without a
GPU it does the same on the CPU with a few layers, so that it can be rehearsed: add `--quick`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import serving
from measure import ON_GPU, SHARED_GPU, Results, machine, options
from models import CHANGES_FOR_A_REHEARSAL, dummy_llama

sys.path.append(str(Path(__file__).parents[1] / "planner"))

import truth_table
from truth_service import KLLM, send
from truth_simulated import handover, imitate, measured

from kllm.bench.plan import Planned
from kllm.sim.offered import Part, of_trace

TRACE = Path(__file__).parent / "azure_conv_80s.csv"
"""The second minute of Azure's conversation trace of 2023, and 20 seconds more: 4.8 requests per second."""
KV_TOKENS = 150_000
_WARMUPS, _FIRST = 20, 5
_WARM_SECONDS = 20.0
"""Of the trace, sent before with other prompts: kernels of a new shape are compiled when it comes first."""


def requests(*, quick: bool) -> tuple[Planned, ...]:
    """What is sent."""
    part = Part(end=40.0, scale=0.5) if quick else Part()
    offered = of_trace(TRACE, part, inputs=None, outputs=None, seed=1).requests
    # Steps on the CPU take a tenth of a second.
    fits = [each for each in offered if not quick or (each.input_tokens < 1500 and each.output_tokens < 80)]
    return tuple(replace(each, index=index) for index, each in enumerate(fits))


def calibrate(url: str, path: Path, *, quick: bool) -> dict[str, Any]:
    """Fit the timing of the engines into a file, and return what it holds."""
    lengths, batches, repeats = ("64,256,512", "1,2,4", 1) if quick else ("128,512,1024,2048,4096", "1,2,4,8,16", 3)
    options = {
        "--url": url, "--lengths": lengths, "--batches": batches, "--answer-tokens": 16 if quick else 64,
        "--repeats": repeats, "--chunk-tokens": SHARED_GPU["chunked-prefill-size"], "--kv-tokens": KV_TOKENS,
        "-o": path,
    }  # fmt: skip
    arguments = [str(part) for option in options.items() for part in option]
    subprocess.run([*KLLM, "calibrate", *arguments], check=True, timeout=300)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def compare(document: dict[str, Any], results: Results, *, quick: bool) -> None:
    load = requests(quick=quick)
    warm = [replace(each, index=len(load) + each.index) for each in load if each.at < _WARM_SECONDS]
    with serving.up(document) as service:
        results.add("ready_seconds", round(service.ready_seconds, 2))
        asyncio.run(send(service.url, warm, warmups=1, quiet_seconds=0.0))
        engine = service.folder / "engine.json"
        results.add("engine", calibrate(service.url, engine, quick=quick))
        sent = asyncio.run(send(service.url, load, warmups=_WARMUPS, quiet_seconds=2.0))
        real = {
            "lead_seconds": 0.0,
            "start_seconds": None,
            "handover": handover(sent.alone[_FIRST:]),
            "before": [],
            "requests": [measured(row) for row in sent.rows],
        }
        results.add("real", real)
        simulated = imitate(real, manifest=document, engine=engine, policy="static:1,1", initial="1,1")
    objectives = document["spec"]["objectives"]
    ttft, tpot = objectives["ttftMilliseconds"] / 1000, objectives["tpotMilliseconds"] / 1000
    both = (truth_table.figures(each["requests"], ttft=ttft, tpot=tpot) for each in (real, simulated))
    results.add("simulated", simulated)
    results.add("figures", truth_table.beside(*both))


def main() -> None:
    given = options(__doc__, quick="few and short requests, a few layers").parse_args()
    engine_args: dict[str, Any] = {
        **(SHARED_GPU if ON_GPU else {"context-length": 4096, "chunked-prefill-size": 8192}),
        "max-total-tokens": KV_TOKENS,
        "load-format": "dummy",
    }
    with tempfile.TemporaryDirectory(prefix="kllm-gpu-model-") as folder:
        cache = Path(folder) / "cache"
        command = ["kllm_engine.main", "model", "demo://smollm2-135m", "--cache", str(cache)]
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL, timeout=300)
        tokenizer = next(cache.glob("models/*/tokenizer.json")).parent
        model = dummy_llama(Path(folder) / "llama", tokenizer, CHANGES_FOR_A_REHEARSAL if given.quick else {})
        results = Results(given.out, machine=machine(), note=given.note, engine_args=engine_args)
        compare(serving.manifest(str(model), engine_args), results, quick=given.quick)


if __name__ == "__main__":
    main()
