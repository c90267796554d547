"""What `kllm status` knows, as tables for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kllm.rows import NOT_ANSWERING, Row
from kllm_core.fleet import InstanceState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_tables(rows: list[Row]) -> None:
    """Each service with its pools and its processes."""
    console = new_console()
    for service in dict.fromkeys(row.service for row in rows):
        mine = [row for row in rows if row.service == service]
        console.print(_heading(service, mine), soft_wrap=True)
        if pools := next((row.pools for row in mine if row.pools), None):
            console.print(_pool_table(pools))
        console.print(_instance_table(mine))


def new_console() -> Console:
    """Where tables are printed."""
    from rich.console import Console  # noqa: PLC0415 - JSON does not need it

    # Without a terminal the width is unknown, and cut columns would be of no use to a reader.
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)


def new_table(*titles: str, texts: int) -> Table:
    """A table whose first columns hold text and whose others hold numbers."""
    from rich import box  # noqa: PLC0415 - JSON does not need it
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, no_wrap=True, justify="left" if index < texts else "right")
    return table


def _pool_table(pools: dict[str, dict[str, Any]]) -> Table:
    numbers = ("LOAD", "PREDICTED", "MEASURED", "DESIRED", "READY", "WARMING", "DRAINING")
    table = new_table("POOL", "LIMITED BY", *numbers, texts=2)
    for name, pool in pools.items():
        load = pool["load"]
        loads = (_two_places(load[key]) for key in ("value", "predicted", "measured"))
        counts = (str(pool[key]) for key in ("desired", "ready", "warming", "draining"))
        table.add_row(name, _cell(load["term"]), *loads, *counts)
    return table


def _instance_table(rows: list[Row]) -> Table:
    paced = any(row.pacing for row in rows)
    titles = ("NAME", "ROLE", "STATE", "RUNNING", "QUEUED", "PARKED", "KV", "PID", "PSS MIB")
    table = new_table(*titles, *(("PACING",) if paced else ()), texts=3)
    # On a terminal of 80 columns a long state takes two lines, so that no number is cut.
    table.columns[titles.index("STATE")].no_wrap = False
    for row in rows:
        table.add_row(
            row.id, row.role, _state(row), _cell(row.running), _cell(row.queued), _cell(row.parked),
            "-" if row.kv_used_share is None else f"{row.kv_used_share:.0%}",
            str(row.pid), "-" if row.pss_bytes is None else f"{row.pss_bytes / (1 << 20):.0f}",
            *((row.pacing or "-",) if paced else ()),
        )  # fmt: skip
    return table


def _state(row: Row) -> str:
    """What its requests meet: an instance that says that it serves may be one that the router does not trust."""
    if row.state == NOT_ANSWERING:
        return "not answering"
    if row.state == InstanceState.SERVING and row.silent:
        return "silent"
    if row.state == InstanceState.SERVING and row.ejected_seconds is not None:
        return f"ejected, {row.ejected_seconds:.0f} s"
    return _cell(row.state)


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
