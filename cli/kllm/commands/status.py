"""`kllm status`: what is up on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from kllm.running import find_running
from kllm_core.authentication import bearer, read_token_file
from kllm_operator.substrate.identity import members
from kllm_operator.substrate.rundir import RunDirectory, RunState, service_names

if TYPE_CHECKING:
    from rich.table import Table

_TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class Row:
    """One process of a service; None is unknown.

    Attributes:
        kv_used_share: of the KV cache that requests hold.
        pss_bytes: memory of the process and its descendants, shared pages divided among their users.
        address: URL of a router, address of an instance's agent.
        grpc: host:port of a router's gRPC server.
        pacing: how long an engine's steps are made to last; empty when they are as they are.
        pools: of a router: both pools as the control loop sees them.
    """

    service: str
    id: str
    role: str
    state: str | None
    running: int | None
    queued: int | None
    parked: int | None
    kv_used_share: float | None
    pid: int
    pss_bytes: int | None
    address: str | None
    grpc: str | None
    model: str
    uptime_seconds: float
    pacing: str | None = None
    pools: dict[str, dict[str, Any]] | None = None


def watch(name: str | None, *, seconds: float) -> int:
    """Show it again and again until Ctrl-C; returns what `run` last returned."""
    status = 0
    try:
        while status == 0:
            print("\x1b[2J\x1b[H", end="")
            status = run(name, as_json=False)
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()
    return status


def run(name: str | None, *, as_json: bool) -> int:
    """Returns 0 with something to show, 2 when nothing (or not the named service) is up."""
    names, problem = find_running(name)
    if problem is not None:
        if as_json and name is None:
            print("[]")
        if not _mention_killed(name):
            print(f"kllm: {problem}", file=sys.stderr)
        return 2
    rows = [row for service in names for row in _rows(RunDirectory(service))]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _print(rows)
    return 0


def _mention_killed(name: str | None) -> bool:
    killed = [
        service for service in service_names()
        if name in {None, service} and (run := RunDirectory(service)).read_state() is not None and not run.is_owned
    ]  # fmt: skip
    for service in killed:
        print(f"kllm: `kllm up` of {service!r} was killed; clean up with: kllm down {service}", file=sys.stderr)
    return bool(killed)


def _rows(run: RunDirectory) -> list[Row]:
    state = run.read_state()
    if state is None:
        return []
    seen = _told_by_router(run, state)
    memory = _memory(run, state)
    agents = _agents(run)
    control = _control(run)
    rows = []
    for record in state.processes:
        instance = seen.get(record.id, {})
        load = instance.get("load") or {}
        is_router, is_instance = record.kind == "router", record.kind in {"prefill", "decode"}
        told = control.get("instances", {}).get(record.id, {})
        rows.append(
            Row(
                service=state.service,
                id=record.id,
                role=str(instance.get("role") or told.get("role") or record.kind),
                state=instance.get("state") or told.get("state") or (None if is_instance else state.phase),
                running=load.get("running_requests"),
                queued=load.get("queued_requests"),
                parked=load.get("parked_requests"),
                kv_used_share=_share(load),
                pid=record.pid,
                pss_bytes=memory.get(record.id),
                address=state.url if is_router else agents.get(record.id),
                grpc=state.grpc if is_router else None,
                model=state.model,
                uptime_seconds=round(_uptime(record.started), 1),
                pacing=told.get("pacing"),
                pools=control.get("pools") if is_router else None,
            )
        )
    return sorted(rows, key=lambda row: row.id)


def _told_by_router(run: RunDirectory, state: RunState) -> dict[str, dict[str, Any]]:
    """What the router knows of each instance; nothing while it does not answer."""
    if state.url is None:
        return {}
    try:
        headers = {"authorization": bearer(read_token_file(run.token_file))}
        url = f"{state.url}/kllm/v1/status"
        with httpx2.Client(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            response = client.get(url, headers=headers)
        response.raise_for_status()
        instances = response.json()["instances"]
        return {str(instance["id"]): instance for instance in instances}
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        print(f"kllm: the router of {state.service!r} does not tell its status: {error}", file=sys.stderr)
        return {}


def _agents(run: RunDirectory) -> dict[str, str]:
    try:
        document = json.loads(run.fleet_file.read_text(encoding="utf-8"))
        return {str(item["id"]): str(item["agent"]) for item in document["instances"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _control(run: RunDirectory) -> dict[str, Any]:
    """What the control loop last published; nothing before its first tick."""
    try:
        document: dict[str, Any] = json.loads(run.control_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document


def _memory(run: RunDirectory, state: RunState) -> dict[str, int]:
    """Bytes by process name. An engine is no child of its agent; ID.log is the agent's, ID.engine.log the engine's."""
    pss: dict[str, int] = defaultdict(int)
    for process in members(state.run_id, [record.identity for record in state.processes]):
        try:
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        if log.parent == run.log_file("x").parent:
            kilobytes = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
            pss[log.name.removesuffix(".log").removesuffix(".engine")] += 1024 * sum(kilobytes)
    return pss


def _uptime(started_ticks: int) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))


def _share(load: dict[str, Any]) -> float | None:
    used, total = load.get("kv_used_tokens"), load.get("kv_total_tokens")
    return round(used / total, 4) if used is not None and total else None


def _print(rows: list[Row]) -> None:
    from rich.console import Console  # noqa: PLC0415 - JSON does not need it

    # Without a terminal the width is unknown, and cut columns would be of no use to a reader.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    for service in dict.fromkeys(row.service for row in rows):
        mine = [row for row in rows if row.service == service]
        console.print(_heading(service, mine), soft_wrap=True)
        if pools := next((row.pools for row in mine if row.pools), None):
            console.print(_pool_table(pools))
        console.print(_instance_table(mine))


def _table(*titles: str, texts: int) -> Table:
    """A table whose first columns hold text and whose others hold numbers."""
    from rich import box  # noqa: PLC0415 - JSON does not need it
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, no_wrap=True, justify="left" if index < texts else "right")
    return table


def _pool_table(pools: dict[str, dict[str, Any]]) -> Table:
    numbers = ("LOAD", "PREDICTED", "MEASURED", "DESIRED", "READY", "WARMING", "DRAINING")
    table = _table("POOL", "LIMITED BY", *numbers, texts=2)
    for name, pool in pools.items():
        load = pool["load"]
        loads = (_two_places(load[key]) for key in ("value", "predicted", "measured"))
        counts = (str(pool[key]) for key in ("desired", "ready", "warming", "draining"))
        table.add_row(name, _cell(load["term"]), *loads, *counts)
    return table


def _instance_table(rows: list[Row]) -> Table:
    paced = any(row.pacing for row in rows)
    titles = ("NAME", "STATE", "RUNNING", "QUEUED", "PARKED", "KV", "PID", "PSS MIB")
    table = _table(*titles, *(("PACING",) if paced else ()), texts=2)
    for row in rows:
        table.add_row(
            row.id, _cell(row.state), _cell(row.running), _cell(row.queued), _cell(row.parked),
            "-" if row.kv_used_share is None else f"{row.kv_used_share:.0%}",
            str(row.pid), "-" if row.pss_bytes is None else f"{row.pss_bytes / (1 << 20):.0f}",
            *((row.pacing or "-",) if paced else ()),
        )  # fmt: skip
    return table


def _two_places(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _heading(service: str, rows: list[Row]) -> str:
    router = next((row for row in rows if row.role == "router"), None)
    oldest = _duration(max(row.uptime_seconds for row in rows))
    if router is None or router.address is None:
        return f"{service}: {rows[0].model} is starting, for {oldest}"
    grpc = f", gRPC at {router.grpc}" if router.grpc else ""
    return f"{service}: {rows[0].model} at {router.address}{grpc}, up for {oldest}"


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
