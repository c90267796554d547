"""A long run at most of the machine's capacity with random deaths; `make soak`.

python bench/soak/soak.py [--minutes 15] [--share 0.8] [--seed 1] [--pause 30] [--json FILE] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from engines.service_under_test import HELD, Service, manifest, up
from kills import Kills
from load import KnownLoad, Tally
from watch import Watch

from kllm.bench.machine import machine_facts

_CLIENTS = 24
_CAPACITY_SECONDS = 20.0
_SAMPLE_SECONDS = 2.0
_IDLE_SECONDS = 40.0  # decode instances keep pages of a lost transfer for 30 s
_INSTANCES = 4
_ENGINE_ARGS = {"chunked-prefill-size": 256, "context-length": 4096}
_RSS_KIB_PER_MINUTE = 512.0
_DESCRIPTORS_LEFT = 16


async def soak(service: Service, given: argparse.Namespace) -> dict[str, Any]:
    """Measure capacity in peace, then load and kill; returns the result."""
    load = KnownLoad(service.url, given.seed)
    await load.learn()
    capacity = await load.capacity(clients=_CLIENTS, seconds=_CAPACITY_SECONDS)
    in_peace, load.tally = dict(load.tally.outcomes), Tally()
    say(f"capacity {capacity:.1f} requests/s of {_CLIENTS} clients; load {given.share * capacity:.1f}/s")
    await _idle(service)
    watch = Watch()
    kills = Kills(service, whole=lambda: _whole(service), rng=random.Random(given.seed), pause=given.pause)
    beside = [asyncio.create_task(kills.run()), asyncio.create_task(_observe(service, watch, load))]
    try:
        await load.run(rate=given.share * capacity, seconds=given.minutes * 60)
    finally:
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    held = await _idle(service)
    watch.sample(_watched(service))
    return _result(given, load, kills, watch, {"capacity": capacity, "in_peace": in_peace, "held": held})


def verdict(result: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    problems = [f"{len(result['wrong'])} wrong answers"] if result["wrong"] else []
    if result["failed"]:
        problems.append(f"{len(result['failed'])} failed requests")
    if result["held_at_the_end"]:
        problems.append(f"engines still hold {result['held_at_the_end']}")
    for name, figures in result["processes"].items():
        if figures["rss_kib_per_minute"] > _RSS_KIB_PER_MINUTE:
            problems.append(f"{name} grows by {figures['rss_kib_per_minute']} KiB a minute")
        if figures["descriptors_last"] > figures["descriptors_first"] + _DESCRIPTORS_LEFT:
            problems.append(
                f"{name} has {figures['descriptors_last']} open files, {figures['descriptors_first']} at first"
            )
    return problems


def _result(
    given: argparse.Namespace, load: KnownLoad, kills: Kills, watch: Watch, more: dict[str, Any]
) -> dict[str, Any]:
    result = {
        "minutes": given.minutes,
        "seed": given.seed,
        "machine": machine_facts(),
        "capacity_per_second": round(more["capacity"], 2),
        "rate_per_second": round(given.share * more["capacity"], 2),
        "sent_per_second": round(load.sent_per_second, 2),
        "in_peace": more["in_peace"],
        "outcomes": dict(load.tally.outcomes),
        "wrong": load.tally.wrong,
        "failed": load.tally.failed,
        "kills": kills.document(),
        "held_at_the_end": more["held"],
        "processes": watch.summary(),
    }
    return {**result, "problems": verdict(result)}


async def _observe(service: Service, watch: Watch, load: KnownLoad) -> None:
    told = time.monotonic()
    while True:
        watch.sample(_watched(service))
        if time.monotonic() - told > 60:
            told = time.monotonic()
            say(f"{told - watch.began:5.0f} s: {dict(load.tally.outcomes)}")
        await asyncio.sleep(_SAMPLE_SECONDS)


def _watched(service: Service) -> dict[str, int]:
    return {"router": service.pids()["router-0"], "kllm up": service.process.pid}


async def _instances(service: Service) -> list[dict[str, Any]]:
    async with httpx2.AsyncClient(timeout=10) as client:
        return list((await client.get(f"{service.url}/kllm/v1/status")).json()["instances"])


async def _whole(service: Service) -> bool:
    told = await _instances(service)
    return sum(item["state"] == "Serving" and item["connected"] for item in told) == _INSTANCES


async def _idle(service: Service) -> dict[str, Any]:
    """Wait until no engine holds anything; returns what is held after that long."""
    end = time.monotonic() + _IDLE_SECONDS
    while True:
        held = {}
        for item in await _instances(service):
            load = item.get("load") or {}
            if counts := {name: load[name] for name in HELD if load.get(name)}:
                held[item["id"]] = counts
        if not held or time.monotonic() > end:
            return held
        await asyncio.sleep(0.2)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def main() -> int:
    """Returns 0 when all is as it must be, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the measured capacity (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=30.0, help="mean seconds between deaths (default %(default)s)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    parser.add_argument("--logs", type=Path, help="where the service's logs go when the run has problems")
    given = parser.parse_args()
    document = manifest(name="soak", uri="demo://tiny-random-llama", replicas=2, engine_args=_ENGINE_ARGS)
    with up(document) as service:
        result = asyncio.run(soak(service, given))
        if result["problems"] and given.logs is not None:
            shutil.copytree(service.run / "logs", given.logs, dirs_exist_ok=True)
            shutil.copy(service.run.parent.parent / "up.err", given.logs)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    say(json.dumps({name: result[name] for name in ("outcomes", "processes", "problems")}, indent=1))
    say(f"{len(result['kills'])} deaths in {given.minutes:g} minutes; written to {given.json}")
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
