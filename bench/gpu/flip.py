"""Exchange the roles of a prefill and a decode instance on one GPU, twice, and compare greedy texts.

python bench/gpu/flip.py --out results/flip.json
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import serving
from asking import first_answer, prompt, texts
from measure import ON_GPU, SHARED_GPU, Results, machine, options

from kllm_core.authentication import METADATA_KEY, bearer
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc

CACHE = Path.home() / ".cache" / "kllm"
OTHER = {"prefill": "decode", "decode": "prefill"}
ROLES = {"prefill": engine_pb2.ROLE_PREFILL, "decode": engine_pb2.ROLE_DECODE}


def switch(service: serving.Service) -> dict[str, Any]:
    """Drain and switch every instance, then tell the router; seconds of each part."""
    path = service.run / "fleet.json"
    document = json.loads(path.read_text())
    metadata = [(METADATA_KEY, bearer(service.token))]
    seconds = {}
    for entry in document["instances"]:
        with grpc.insecure_channel(entry["agent"]) as channel:
            stub = engine_pb2_grpc.EngineAgentStub(channel)
            began = time.monotonic()
            for progress in stub.Drain(engine_pb2.DrainRequest(deadline_milliseconds=10_000), metadata=metadata):
                if progress.drained:
                    break
            drained = time.monotonic()
            wanted = OTHER[entry["role"]]
            answer = stub.SwitchRole(engine_pb2.SwitchRoleRequest(role=ROLES[wanted]), metadata=metadata, timeout=60)
            seconds[f"{entry['id']} to {wanted}"] = {
                "drain_seconds": round(drained - began, 3),
                "switch_seconds": round(answer.switch_seconds, 3),
                "call_seconds": round(time.monotonic() - drained, 3),
            }
            entry["role"] = wanted
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(document, file)
    Path(file.name).replace(path)
    return seconds


@contextmanager
def fleet(uri: str, engine_args: dict[str, Any]) -> Iterator[serving.Service]:
    """A zygote, two agents and a router, without a control loop that would have its own mind about roles."""
    with tempfile.TemporaryDirectory(prefix="kllm-gpu-") as name, ExitStack() as processes:
        run = Path(name)
        (run / "token").write_text("a-token-for-benchmarks")
        model = told(processes, "engine", "model", uri, "--cache", str(CACHE), until="model")["path"]
        began = time.monotonic()
        told(processes, "engine", "zygote", "--socket", str(run / "zygote.sock"), until="ready")
        instances = []
        for role in OTHER:
            agent = told(
                processes, "engine", "agent", "--instance-id", f"gpu-{role}-0", "--service", "gpu", "--role", role,
                "--model", model, "--model-name", serving.MODEL_NAME, "--token-file", str(run / "token"),
                "--zygote", str(run / "zygote.sock"), "--run-dir", str(run), "--engine-args", json.dumps(engine_args),
                until="listening",
            )["agent"]  # fmt: skip
            instances.append({"id": f"gpu-{role}-0", "role": role, "agent": agent})
        (run / "fleet.json").write_text(json.dumps({"version": 1, "instances": instances}))
        listening = told(
            processes, "router", "--listen", "127.0.0.1:0", "--fleet", str(run / "fleet.json"), "--token-file",
            str(run / "token"), "--model-name", serving.MODEL_NAME, "--tokenizer", model, until="",
        )["http"]  # fmt: skip
        serving.wait_for(f"http://{listening}/readyz")
        yield serving.Service(f"http://{listening}", run, run, time.monotonic() - began, [])


def told(processes: ExitStack, package: str, *arguments: str, until: str) -> dict[str, Any]:
    """Start a program that runs until the stack ends; what it prints when it has come so far."""
    command = [sys.executable, "-P", "-m", f"kllm_{package}.main", *arguments, "--parent-pid", str(os.getpid())]
    process = processes.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    processes.callback(process.terminate)
    for line in process.stdout:
        event = json.loads(line)
        if until in {"", event.get("event")}:
            return event
    raise RuntimeError(f"{arguments[0]} ended with {process.wait()}")


async def measure(results: Results, service: serving.Service, prompts: list[list[int]], tokens: int) -> None:
    results.add("start", {"ready_seconds": round(service.ready_seconds, 2), "instances": service.instances()})
    before = [answer.text for answer in await texts(service.endpoint, prompts, tokens)]
    for number in (1, 2):
        # Of its own: a prompt that is in the cache is computed in other kernels.
        probe = prompt(16, seed=f"probe/{number}", vocabulary=500)
        began = time.monotonic()
        outcome = await asyncio.to_thread(switch, service)
        await first_answer(service.endpoint, probe, seconds=60)
        outcome["first_answer_seconds"] = round(time.monotonic() - began, 3)
        after = [answer.text for answer in await texts(service.endpoint, prompts, tokens)]
        outcome["equal_texts"] = f"{sum(a == b for a, b in zip(before, after, strict=True))} of {len(prompts)}"
        outcome["instances"] = {name: facts["role"] for name, facts in service.instances().items()}
        results.add(f"flip_{number}", outcome)


def main() -> None:
    given = options(__doc__, quick="tiny model").parse_args()
    engine_args = dict(SHARED_GPU) | {"max-total-tokens": 300_000} if ON_GPU else {"context-length": 4096}
    uri, vocabulary = ("demo://tiny-random-llama", 500) if given.quick else ("demo://smollm2-135m", 49_000)
    sizes = (17, 300, 700) if given.quick else (17, 64, 300, 700, 1500, 3000)
    prompts = [prompt(size, seed=f"flip/{size}", vocabulary=vocabulary) for size in sizes]
    results = Results(given.out, machine=machine(), note=given.note, engine_args=engine_args, uri=uri)
    with fleet(uri, engine_args) as service:
        try:
            asyncio.run(measure(results, service, prompts, 32))
        finally:
            print(serving.logs(service.run), file=sys.stderr)


if __name__ == "__main__":
    main()
