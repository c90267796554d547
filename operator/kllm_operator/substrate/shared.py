"""What all instances of a service share on one machine: its model and its router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kllm_operator.substrate.child import Child
from kllm_operator.substrate.children import Children

_REACHABLE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def reachable(address: str) -> str:
    """Where to connect to for a server that listens there."""
    host, _, port = address.rpartition(":")
    return f"{_REACHABLE.get(host, host)}:{port}"


async def resolve_model(children: Children, arguments: tuple[str, ...], *, seconds: float) -> Path:
    """Have the model made available; returns its folder.

    Raises:
        ChildFailedError: it cannot be had, or not in time.
    """
    found: asyncio.Future[Path] = asyncio.get_running_loop().create_future()

    def notice(event: dict[str, Any]) -> None:
        if isinstance(event.get("path"), str) and not found.done():
            found.set_result(Path(event["path"]))

    child = children.spawn("model", "model", arguments, on_event=notice)
    await wait_for_child(child, child.wait(), seconds=seconds)
    if child.exit_status != 0 or not found.done():
        raise child.failed(None if child.exit_status != 0 else "ended without naming the model's folder")
    await children.stop(child, grace_seconds=0)
    return found.result()


async def start_router(children: Children, arguments: tuple[str, ...], *, seconds: float) -> dict[str, Any]:
    """Start the router; returns the event that says where it listens.

    Raises:
        ChildFailedError: it does not listen, or not in time.
    """
    listening: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def notice(event: dict[str, Any]) -> None:
        if event["event"] == "listening" and not listening.done():
            listening.set_result(event)

    child = children.spawn("router-0", "router", arguments, on_event=notice)
    event: dict[str, Any] = await wait_for_child(child, listening, seconds=seconds)
    return event


async def wait_for_child(child: Child, what: Any, *, seconds: float) -> Any:
    """Wait for something that a child will do.

    Raises:
        ChildFailedError: it ended before, or did not do it in time.
    """
    waiting = asyncio.ensure_future(what)
    ended = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({waiting, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise child.failed(None if ended.done() else f"is not ready after {seconds:.0f} s")
    finally:
        waiting.cancel()
        ended.cancel()
