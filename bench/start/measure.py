"""Time until an instance serves: from nothing, and from a slot that is told its role."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from kllm_core.authentication import call_metadata
from kllm_core.contracts.engine.v1 import engine_pb2, engine_pb2_grpc
from kllm_core.objectives import Role
from kllm_core.wire import ROLES
from kllm_engine.models.resolve import resolve

HERE = Path(__file__).parent
TOKEN = "a-token-for-benchmarks-only"
PROGRAM = (sys.executable, "-P", "-m", "kllm_engine.main", "agent")
SECONDS = 300.0


@asynccontextmanager
async def agent(model: Path, *place: str):
    """One agent with a zygote of its own, its stub, and when it was started."""
    with tempfile.TemporaryDirectory(prefix="kllm-start-") as folder:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, *place, "--instance-id", "measured", "--service", "bench", "--model", str(model),
            "--model-name", "model", "--token-file", str(token), "--run-dir", folder, "--parent-pid", str(os.getpid()),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            address = (await event(process))["agent"]
            async with grpc.aio.insecure_channel(address) as channel:
                yield process, engine_pb2_grpc.EngineAgentStub(channel), began
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def event(process: asyncio.subprocess.Process) -> dict:
    """The next thing that the agent announces."""
    told = json.loads(await asyncio.wait_for(process.stdout.readline(), SECONDS))
    if told["event"] == "failed":
        sys.exit(told["message"])
    return told


async def from_nothing(model: Path, role: Role) -> dict:
    """Start to Serving."""
    async with agent(model, "--role", role.value) as (process, _, began):
        told = await event(process)
        return {"way": "nothing", "role": role.value, "seconds": time.monotonic() - began, "phases": told["phases"]}


async def from_slot(model: Path, role: Role) -> dict:
    """Assume to Serving, and what the slot took before."""
    async with agent(model, "--slot") as (process, stub, began):
        watch = stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_milliseconds=50), metadata=call_metadata(TOKEN))
        while (await watch.read()).state != engine_pb2.INSTANCE_STATE_SLOT:
            pass
        watch.cancel()
        told_at = time.monotonic()
        await stub.Assume(engine_pb2.AssumeRequest(role=ROLES[role]), metadata=call_metadata(TOKEN))
        told = await event(process)
        return {
            "way": "slot",
            "role": role.value,
            "seconds": time.monotonic() - told_at,
            "slot_seconds": told_at - began,
            "phases": told["phases"],
        }


async def main() -> None:
    """Measure, print one row a start, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo://smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--note", default="", help="what else the machine did")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kllm"
    model = resolve(arguments.model, cache, lambda message: print(message, file=sys.stderr))
    rows = []
    for _ in range(arguments.runs):
        for way in (from_nothing, from_slot):
            for role in Role:
                rows.append(await way(model, role))
                print(json.dumps(rows[-1]), flush=True)
    for way in ("nothing", "slot"):
        seconds = [row["seconds"] for row in rows if row["way"] == way]
        print(f"{way}: median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}")
    results = HERE / "results" / f"{arguments.model.rpartition('/')[2]}.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps({"model": arguments.model, "note": arguments.note, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
