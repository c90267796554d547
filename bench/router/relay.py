"""CPU of the router's data plane per request and per relayed chunk.

    python bench/router/relay.py FOLDER [--rates 100 200 500] [--seconds 10] [--runs 2]

FOLDER holds gen.c and engine.c: an open-loop HTTP load generator and a mock engine that cost next to nothing.
The router runs alone on core 0, generator and engines on core 1. Each row is one run; results/ keeps all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INTERVAL_MICROSECONDS = 10_000
BODY_BYTES = 4300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 200, 500])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000, help="prompt tokens that each engine gets")
    parser.add_argument("--name", default="relay", help="of the file in results/")
    parser.add_argument("--note", default="", help="what else is to be known of the conditions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as built:
        for name in ("gen", "engine"):
            source = arguments.folder / f"{name}.c"
            subprocess.run(["gcc", "-O2", "-w", "-o", f"{built}/{name}", source, "-lm"], check=True)
        cells = [(r, c) for r in arguments.rates for c in arguments.chunks for _ in range(arguments.runs)]
        random.Random(1).shuffle(cells)
        rows = [measure(Path(built), rate, chunks, arguments) for rate, chunks in cells]
    result = {"machine": machine(), "arguments": {k: str(v) for k, v in vars(arguments).items() if k != "folder"}}
    result |= {"rows": rows, "summary": summarise(rows)}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{arguments.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for line in result["summary"]:
        print(line)


def measure(built: Path, rate: int, chunks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    ports = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        for port in ports:
            command = [f"{built}/engine", str(port), str(chunks), str(INTERVAL_MICROSECONDS)]
            stack.enter_context(running(command, core=1))
        router = stack.enter_context(
            running(
                [
                    *(sys.executable, str(HERE / "serve.py"), "--tokens", str(arguments.tokens)),
                    *("--prefill-port", str(ports[0]), "--decode-port", str(ports[1])),
                ],
                core=0,
            )
        )
        assert router.stdout is not None
        port = int(router.stdout.readline())
        command = ["taskset", "-c", "1", f"{built}/gen", str(port), "/v1/chat/completions"]
        command += [str(rate), str(arguments.seconds), str(BODY_BYTES), "5", str(chunks + 1), str(router.pid)]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=arguments.seconds + 60)
        row: dict[str, Any] = json.loads(out.stdout)
        row["rss_mb"] = round(rss_megabytes(router.pid), 1)
    used = row["pids"][0]
    answered = row["win_rps"] * row["win_s"]
    row |= {"chunks": chunks, "cpu_ms_per_request": (used["u_ms"] + used["s_ms"]) / answered if answered else None}
    row["user_share"] = used["u_ms"] / max(1, used["u_ms"] + used["s_ms"])
    print(json.dumps({k: row[k] for k in ("rate", "chunks", "errors", "cpu_ms_per_request", "ttfc_p50", "ttfc_p99")}))
    return row


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per rate: fixed cost, cost per chunk, and added time to the first chunk."""
    cells: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        cells.setdefault(int(row["rate"]), {}).setdefault(row["chunks"], []).append(row)
    lines = []
    for rate, by_chunks in sorted(cells.items()):
        few, many = min(by_chunks), max(by_chunks)
        cpu = {chunks: statistics.mean(r["cpu_ms_per_request"] for r in by_chunks[chunks]) for chunks in by_chunks}
        line: dict[str, Any] = {"rate": rate, "errors": sum(r["errors"] for c in by_chunks.values() for r in c)}
        line |= {f"cpu_ms_per_request_{chunks}_chunks": round(ms, 3) for chunks, ms in sorted(cpu.items())}
        if many > few:
            line["us_per_chunk"] = round((cpu[many] - cpu[few]) / (many - few) * 1000, 2)
        for name in ("ttfc_p50", "ttfc_p95", "ttfc_p99", "rss_mb"):
            line[name] = round(statistics.mean(r[name] for r in by_chunks[many]), 3)
        lines.append(line)
    return lines


@contextlib.contextmanager
def running(command: list[str], *, core: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rss_megabytes(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def machine() -> dict[str, Any]:
    return {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
