"""Fair chunked prefill beside SGLang's own orders on one GPU: equal outputs, then times to first token under load.

    python bench/gpu/fair_prefill.py identity                       # SmolLM2: fixed prompts, alone and all at once
    python bench/gpu/fair_prefill.py load --policies fcfs fair      # 8B with random weights, Poisson arrivals
    python bench/gpu/fair_prefill.py report results/fair_prefill-load-*.json

The load is that of a prefill instance: one output token. 95 % of the prompts have 200 to 2,000 tokens, 5 % 16k to 128k,
both log-uniform; no two share a prefix. Rates are shares of stock's capacity, which is measured first: a hundred
prompts of exactly this mix, all at once. Every policy gets the same arrivals. Results are written as they come, into
$OUT or results/. With several GPUs: one process for each, with CUDA_VISIBLE_DEVICES and another --seed.

Without a GPU the same is done with a tiny model, short prompts and few requests: --rehearse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import serving
from measure import ON_GPU, Results, machine
from models import CHANGES_FOR_A_REHEARSAL, dummy_llama

from kllm_core.objectives import Role
from kllm_engine.messages import PREFILL_ORDER_VARIABLE
from kllm_engine.sglang.arguments import EngineSettings, launch
from kllm_engine.start.client import ZygoteClient

HERE = Path(__file__).parent
KEY = "a-key-for-benchmarks"
POLICIES = {
    "fcfs": ("fcfs", "fcfs"),
    "shortest": ("fcfs", "shortest-prefill-first"),
    "fair": ("fair", "fcfs"),
}
"""kLLM's order and SGLang's schedule-policy."""


@dataclass(frozen=True)
class Sizes:
    """What is asked, and of what.

    Attributes:
        short: tokens of short prompts, smallest and largest.
        long: the same of long ones.
        context: longest prompt with output that the engine takes.
        vocabulary: ids of prompts are below it.
        identity: tokens of the prompts whose outputs are compared.
        identity_chunk: tokens of a prefill step in that comparison.
        engine_args: SGLang's, for the load.
    """

    short: tuple[int, int]
    long: tuple[int, int]
    context: int
    vocabulary: int
    identity: tuple[int, ...]
    identity_chunk: int
    engine_args: dict[str, Any]


ON_H200 = Sizes(
    short=(200, 2_000),
    long=(16_384, 131_072),
    context=132_000,
    vocabulary=49_000,
    identity=(5, 17, 100, 300, 6000, 40, 700, 64, 4000, 250, 90, 2500, 33, 7500, 128, 400, 1500, 60, 5000, 200),
    identity_chunk=512,
    engine_args={
        "attention-backend": "triton", "sampling-backend": "pytorch", "dtype": "bfloat16", "mem-fraction-static": 0.88,
        "max-running-requests": 128, "cuda-graph-max-bs-decode": 32, "chunked-prefill-size": 8192,
    },
)  # fmt: skip
REHEARSAL = Sizes(
    short=(4, 40),
    long=(320, 2_500),
    context=4_096,
    vocabulary=500,
    identity=(5, 17, 600, 40, 900, 64, 33, 300),
    identity_chunk=64,
    engine_args={"chunked-prefill-size": 160, "max-total-tokens": 16_384, "max-running-requests": 64},
)


def log_uniform(bounds: tuple[int, int], share: float) -> int:
    low, high = bounds
    return round(low * (high / low) ** share)


def prompt(tokens: int, *, seed: str, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return rng.choices(range(100, vocabulary), k=tokens)


def mix(sizes: Sizes, count: int) -> list[int]:
    """Prompt lengths of exactly the mix: quantiles of both kinds, long ones evenly between the short ones."""
    many = max(1, count // 20)
    long = [log_uniform(sizes.long, (index + 0.5) / many) for index in range(many)]
    rest = count - many
    short = [log_uniform(sizes.short, (index + 0.5) / rest) for index in range(rest)]
    random.Random("mix").shuffle(short)
    random.Random("mix").shuffle(long)
    every = rest // many
    return [
        tokens for index, one in enumerate(long) for tokens in [one, *short[index * every : (index + 1) * every]]
    ] + short[many * every :]


def arrivals(sizes: Sizes, *, rate: float, window: float, seed: int) -> list[tuple[float, int]]:
    """Seconds and prompt tokens; one arrival in twenty is long, at a random place among them."""
    rng = random.Random(f"arrivals/{seed}")
    now, found = 0.0, []
    places: list[bool] = []
    while (now := now + rng.expovariate(rate)) < window:
        if not places:
            places = [index == 0 for index in range(20)]
            rng.shuffle(places)
        found.append((now, log_uniform(sizes.long if places.pop() else sizes.short, rng.random())))
    return found


@dataclass
class Server:
    """A running SGLang server."""

    url: str
    ready_seconds: float

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.url, timeout=600, headers={"authorization": f"Bearer {KEY}"},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=512),
        )  # fmt: skip


@asynccontextmanager
async def zygote(folder: Path) -> AsyncIterator[Path]:
    """A process that has imported SGLang and forks servers; its socket."""
    arguments = ["-P", "-m", "kllm_engine.main", "zygote", "--socket", str(folder / "z.sock")]
    log = folder / "zygote.log"
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--parent-pid", str(os.getpid()), stdout=subprocess.PIPE, stderr=stderr
        )
    try:
        if not await process.stdout.readline():
            raise RuntimeError(f"the zygote ended: {log.read_text()[-2000:]}")
        yield folder / "z.sock"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def server(
    socket: Path, model: Path, *, policy: str, context: int, engine_args: dict[str, Any]
) -> AsyncIterator[Server]:
    """A server that computes prompts in the order of a policy."""
    order, schedule_policy = POLICIES[policy]
    port = serving.free_port()
    settings = EngineSettings(
        role=Role.PREFILL, model_path=model, model_name="model", http_port=port, bootstrap_port=serving.free_port(),
        distributed_port=serving.free_port(), device="cuda" if ON_GPU else "cpu", api_key=KEY, context_tokens=context,
        engine_args=engine_args | {"schedule-policy": schedule_policy},
    )  # fmt: skip
    started = launch(settings)
    log = socket.parent / f"{policy}.log"
    began = time.monotonic()
    process = await ZygoteClient(socket).fork(
        name=policy,
        args=serving.in_one_piece(started.arguments),
        env=started.environment | {PREFILL_ORDER_VARIABLE: order},
        log=log,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        ready = asyncio.create_task(asyncio.to_thread(serving.wait_for, f"{url}/ready", token=KEY))
        ended = asyncio.create_task(process.wait_exit())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise RuntimeError(f"the server ended: {log.read_text()[-3000:]}")
        ready.result()
        yield Server(url, time.monotonic() - began)
    finally:
        await process.kill()
        await process.wait_exit()
        await process.close()
        await asyncio.to_thread(wait_for_memory)


def wait_for_memory(*, mebibytes: int = 3000, seconds: float = 20) -> None:
    """Until the GPU is as good as empty: the next server sizes its pool by what is free when it starts."""
    if not ON_GPU:
        return
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.split()
        if told and int(told[0]) < mebibytes:
            return
        time.sleep(0.2)


async def ask(client: httpx2.AsyncClient, body: bytes) -> tuple[list[int], float]:
    """Output ids and seconds until they were there."""
    began = time.monotonic()
    response = await client.post("/generate", content=body, headers={"content-type": "application/json"})
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
    return response.json()["output_ids"], time.monotonic() - began


def body_of(ids: list[int], outputs: int) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": outputs, "ignore_eos": True}
    return json.dumps({"input_ids": ids, "sampling_params": sampling}).encode()


async def identity(results: Results, sizes: Sizes, folder: Path, model: Path) -> None:
    """Greedy outputs of fixed prompts: one after the other, then all at once, so that long ones give way."""
    dtypes = ("bfloat16", "float32") if ON_GPU else ("float32",)
    prompts = [prompt(size, seed=f"same/{size}", vocabulary=sizes.vocabulary) for size in sizes.identity]
    bodies = [body_of(ids, 32) for ids in prompts]
    async with zygote(folder) as socket:
        for dtype in dtypes:
            args = sizes.engine_args | {"chunked-prefill-size": sizes.identity_chunk, "dtype": dtype}
            args |= {"max-total-tokens": 100_000} if ON_GPU else {}
            outputs: dict[str, list[list[int]]] = {}
            try:
                for policy in ("fcfs", "fair"):
                    async with server(socket, model, policy=policy, context=8_192 if ON_GPU else sizes.context,
                                      engine_args=args) as running:  # fmt: skip
                        async with running.client() as client:
                            alone = [(await ask(client, body))[0] for body in bodies]
                            await client.post("/flush_cache")
                            at_once = await asyncio.gather(*(ask(client, body) for body in bodies))
                        outputs[f"{policy} alone"] = alone
                        outputs[f"{policy} at once"] = [ids for ids, _ in at_once]
            except (RuntimeError, httpx2.HTTPError, TimeoutError) as error:
                results.add(f"identity {dtype}", {"failed": str(error)[-3000:]})
                continue
            expected = outputs["fcfs alone"]
            equal = {
                name: f"{sum(a == b for a, b in zip(ids, expected, strict=True))} of {len(expected)}"
                for name, ids in outputs.items()
            }
            distinct = len({tuple(ids) for ids in expected})
            results.add(
                f"identity {dtype}",
                {"equal_to_fcfs_alone": equal, "distinct_outputs": distinct, "prompts": list(sizes.identity),
                 "chunk": sizes.identity_chunk, "outputs_rows": outputs},
            )  # fmt: skip


async def warm_up(server_: Server, sizes: Sizes, *, timed: bool) -> dict[str, Any]:
    """Compile what the load needs; then, if timed, a hundred prompts of the mix at once: the capacity."""
    lengths = [sizes.short[0], sizes.short[1], sizes.long[0], log_uniform(sizes.long, 0.5)]
    async with server_.client() as client:
        outputs = []
        for index, tokens in enumerate(lengths):
            ids = prompt(tokens, seed=f"warm/{index}", vocabulary=sizes.vocabulary)
            outputs.append((await ask(client, body_of(ids, 8 if index < 2 else 1)))[0])
        found: dict[str, Any] = {"ready_seconds": round(server_.ready_seconds, 1), "outputs_rows": outputs}
        if timed:
            many = mix(sizes, 100)
            bodies = [
                body_of(prompt(size, seed=f"mix/{index}", vocabulary=sizes.vocabulary), 1)
                for index, size in enumerate(many)
            ]
            began = time.monotonic()
            await asyncio.gather(*(ask(client, body) for body in bodies))
            seconds = time.monotonic() - began
            found |= {"requests": len(many), "tokens": sum(many), "seconds": round(seconds, 3)}
            found["capacity"] = len(many) / seconds
        await client.post("/flush_cache")
    return found


async def offer(server_: Server, sizes: Sizes, plan: list[tuple[float, int]], *, seed: int, drain: float) -> dict:
    """Send every prompt at its time, and wait for the answers, the last of them for `drain` seconds at most."""
    bodies = await asyncio.to_thread(
        lambda: [
            body_of(prompt(tokens, seed=f"load/{seed}/{index}", vocabulary=sizes.vocabulary), 1)
            for index, (_, tokens) in enumerate(plan)
        ]
    )
    rows: list[list[float | None]] = [[round(at, 3), tokens, None, None] for at, tokens in plan]
    lag = 0.0
    async with server_.client() as client:
        began = time.monotonic()

        async def one(index: int) -> None:
            ids, seconds = await ask(client, bodies[index])
            rows[index][2:] = [round(seconds, 4), ids[0]]

        tasks = []
        for index, (at, _) in enumerate(plan):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            lag = max(lag, time.monotonic() - began - at)
            tasks.append(asyncio.create_task(one(index)))
        done, left = await asyncio.wait(tasks, timeout=drain) if tasks else (set(), set())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        errors = [str(task.exception())[:300] for task in done if task.exception() is not None]
        seconds = time.monotonic() - began
    return summary(rows) | {"seconds": round(seconds, 1), "lag": round(lag, 3), "errors": errors[:5], "rows": rows}


def summary(rows: list[list[float | None]]) -> dict[str, Any]:
    """Times to first token in seconds; unanswered requests count as the longest time."""
    answered = sorted(row[2] for row in rows if row[2] is not None)
    times = answered + [math.inf] * (len(rows) - len(answered))
    if not answered:
        return {"requests": len(rows), "unanswered": len(rows)}

    def at(share: float) -> float | None:
        value = times[min(len(times) - 1, math.ceil(share * len(times)) - 1)]
        return round(value, 3) if math.isfinite(value) else None

    longest = sorted((row for row in rows), key=lambda row: -row[1])[: max(1, len(rows) // 100)]
    finished = [row[2] for row in longest if row[2] is not None]
    return {
        "requests": len(rows), "unanswered": len(rows) - len(answered),
        "mean": round(sum(answered) / len(answered), 3), "p50": at(0.5), "p90": at(0.9), "p95": at(0.95),
        "p99": at(0.99), "longest_prompts": len(longest),
        "longest_mean": round(sum(finished) / len(finished), 3) if finished else None,
        "max": round(answered[-1], 3),
    }  # fmt: skip


class Clock:
    """Shares the time that is left among the windows of arrivals that are still to come.

    Args:
        given: the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._began = time.monotonic()
        self._window = given.window or math.inf

    def window(self, engines: int) -> float:
        """Seconds of arrivals of the next load; never more than before, so that policies can be compared.

        Args:
            engines: that are still to be measured, with the present one.
        """
        given = self._given
        left = given.seconds - (time.monotonic() - self._began) - (engines - 1) * given.start_seconds
        self._window = max(5.0, min(self._window, left / (engines * len(given.loads)) - given.drain))
        return self._window


async def load(results: Results, sizes: Sizes, folder: Path, model: Path, given: argparse.Namespace) -> None:
    """Each policy's engine gets the arrivals of each load."""
    clock, capacity = Clock(given), given.capacity
    args = sizes.engine_args | {"load-format": "dummy"}
    async with zygote(folder) as socket:
        for number, policy in enumerate(given.policies):
            try:
                async with server(socket, model, policy=policy, context=sizes.context, engine_args=args) as running:
                    warm = await warm_up(running, sizes, timed=capacity is None)
                    results.add(f"{policy} start", warm)
                    capacity = capacity or warm["capacity"]
                    for share in given.loads:
                        window = clock.window(len(given.policies) - number)
                        plan = arrivals(sizes, rate=share * capacity, window=window, seed=given.seed)
                        found = await offer(running, sizes, plan, seed=given.seed, drain=given.drain)
                        facts = {"policy": policy, "share": share, "seed": given.seed, "window": round(window, 1)}
                        results.add(f"{policy} {share:g} {given.seed}", facts | found)
            except (RuntimeError, httpx2.HTTPError, TimeoutError, OSError) as error:
                log = folder / f"{policy}.log"
                tail = log.read_text()[-3000:] if log.exists() else ""
                results.add(f"{policy} failed", {"error": str(error)[-1000:], "log": tail})


def report(paths: list[Path]) -> None:
    """Requests of all files together, by load and policy, beside those of fcfs."""
    runs: dict[tuple[float, int], dict[str, list]] = {}
    for path in paths:
        for part in json.loads(path.read_text()).values():
            if isinstance(part, dict) and "share" in part:
                runs.setdefault((part["share"], part["seed"]), {})[part["policy"]] = part["rows"]
    together: dict[tuple[float, str], list] = {}
    for (share, _), policies in runs.items():
        # Those that arrived in all of them: a window may have been cut short.
        common = min(len(rows) for rows in policies.values())
        for policy, rows in policies.items():
            together.setdefault((share, policy), []).extend(rows[:common])
    for share in sorted({share for share, _ in together}, reverse=True):
        first = together.get((share, "fcfs"), [])
        base = summary(first) if first else {}
        for policy in POLICIES:
            if rows := together.get((share, policy)):
                cells = [
                    f"{name} {value}{_beside(value, base.get(name), name)}" for name, value in summary(rows).items()
                ]
                equal = sum(a[3] == b[3] for a, b in zip(rows, first, strict=False))
                print(f"{share:g} {policy:9}", "  ".join(cells), f" same first token as fcfs {equal}")


def _beside(value: Any, base: Any, name: str) -> str:
    if not value or not base or name in {"requests", "unanswered", "longest_prompts"}:
        return ""
    return f" ({100 * (value / base - 1):+.0f} %)"


def demo_model(name: str, cache: Path) -> Path:
    command = [sys.executable, "-m", "kllm_engine.main", "model", f"demo://{name}", "--cache", str(cache)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(json.loads(done.stdout.strip().splitlines()[-1])["path"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["identity", "load", "report"])
    parser.add_argument("files", nargs="*", type=Path, help="of a load, for the report")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["fcfs", "fair", "shortest"])
    parser.add_argument("--loads", nargs="+", type=float, default=[0.85], help="shares of stock's capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capacity", type=float, help="requests a second, of a run before; else the first one's")
    parser.add_argument("--seconds", type=float, default=520.0, help="the whole run shall take, starts included")
    parser.add_argument("--start-seconds", type=float, default=40.0, help="one engine's start and warm-up take")
    parser.add_argument("--window", type=float, help="seconds of arrivals, at most; else what the time allows")
    parser.add_argument("--drain", type=float, default=40.0, help="seconds to wait for answers after the last arrival")
    parser.add_argument("--rehearse", action="store_true", help="tiny model, short prompts")
    parser.add_argument("--note", default="", help="conditions worth knowing")
    given = parser.parse_args()
    if given.part == "report":
        report(given.files)
        return
    sizes = REHEARSAL if given.rehearse else ON_H200
    name = f"fair_prefill-{given.part}" + (f"-{given.seed}" if given.part == "load" else "")
    out = Path(os.environ.get("OUT") or HERE / "results") / f"{name}.json"
    with tempfile.TemporaryDirectory(prefix="kllm-fair-") as text:
        folder = Path(text)
        model = demo_model("tiny-random-llama" if given.rehearse else "smollm2-135m", folder / "cache")
        results = Results(out, machine=machine(), note=given.note, sizes=vars(sizes), arguments=_plain(vars(given)))
        if given.part == "identity":
            asyncio.run(identity(results, sizes, folder, model))
            return
        changes = CHANGES_FOR_A_REHEARSAL if given.rehearse else {"max_position_embeddings": sizes.context}
        large = dummy_llama(folder / "llama", model, changes)
        asyncio.run(load(results, sizes, folder, large, given))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "files"}


if __name__ == "__main__":
    main()
