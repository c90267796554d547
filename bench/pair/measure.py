"""Time to ready, TTFT, TPOT, stages and memory of 1P1D and 2P2D on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import yaml

HERE = Path(__file__).parent
SUBJECTS = ("rivers", "bread", "comets", "chess", "trams", "glass", "bees", "maps", "salt", "clocks")


def manifest(replicas: int) -> dict:
    document = yaml.safe_load((HERE.parents[1] / "examples" / "inferenceservice.yaml").read_text())
    for role in ("prefill", "decode"):
        document["spec"][role] = {"minReplicas": replicas, "maxReplicas": replicas}
    return document


@contextmanager
def up(replicas: int):
    with tempfile.TemporaryDirectory(prefix="kllm-bench-") as folder:
        path = Path(folder) / "service.yaml"
        path.write_text(yaml.safe_dump(manifest(replicas)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"XDG_RUNTIME_DIR": folder}
        command = [sys.executable, "-m", "kllm.main", "up", "-f", str(path), "--json", "--port", str(port)]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "serving":
                    break
            else:
                sys.exit("kllm up did not serve")
            yield event["url"], time.monotonic() - began, environment
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def ask(client: httpx2.Client, number: int) -> dict:
    question = f"Question {number}: tell me in a few sentences what you know about {SUBJECTS[number % len(SUBJECTS)]}."
    body = {
        "model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began = time.monotonic()
    first, stages, usage = None, {}, {}
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-kllm-timing": "1"}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if first is None and line:
                first = time.monotonic()
            if line.startswith(": kllm "):
                stages = json.loads(line.removeprefix(": kllm "))
            elif line.startswith("data: {"):
                last = time.monotonic()
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    tokens = usage["completion_tokens"]
    return {
        "ttft_seconds": first - began,
        "tpot_seconds": (last - first) / (tokens - 1),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": tokens,
        "stages": stages,
    }


def measure(replicas: int, requests: int) -> dict:
    with up(replicas) as (url, ready, environment):
        with httpx2.Client(base_url=url, timeout=120) as client:
            rows = [ask(client, number) for number in range(requests + 1)][1:]
        status = subprocess.run(
            [sys.executable, "-m", "kllm.main", "status", "--json"], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        memory = {row["id"]: row["pss_bytes"] for row in json.loads(status.stdout)}
    return {"replicas": replicas, "ready_seconds": ready, "requests": rows, "pss_bytes": memory}


def summary(run: dict) -> str:
    ttft = [row["ttft_seconds"] * 1000 for row in run["requests"]]
    tpot = [row["tpot_seconds"] * 1000 for row in run["requests"]]
    memory = "  ".join(f"{name} {size / 2**20:.0f}" for name, size in sorted(run["pss_bytes"].items()) if size)
    size = run["replicas"]
    return (
        f"{size}P{size}D ready {run['ready_seconds']:.1f} s; TTFT ms p50 {statistics.median(ttft):.0f} "
        f"max {max(ttft):.0f}; TPOT ms p50 {statistics.median(tpot):.1f} max {max(tpot):.1f}; PSS MiB {memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20, help="counted requests per run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each size")
    parser.add_argument("--note", default="", help="conditions worth knowing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pair.json")
    given = parser.parse_args()
    runs = []
    for replicas in (1, 2):
        for _ in range(given.runs):
            runs.append(measure(replicas, given.requests))
            print(summary(runs[-1]), flush=True)
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
    }
    given.out.write_text(json.dumps({"machine": machine, "note": given.note, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
